"""The same weights and batch through several numerics and code paths: where do a GPU's and the CPU's answers part?

Each path gives teacher-forced scores on held-out word problems, the median relative error of a row's streams after each
layer and the share of rows routed otherwise, against a witness (the plain oracle with
fp64 contractions). See docs/log.md for what this settled.
"""

import contextlib
import dataclasses
import time
from collections.abc import Generator

import torch
from torch import Tensor

from oracle import model as oracle
from oracle.model import Functions, Numerics, Options
from train.cases import Case
from train.dialogue import Encoder
from train.functions import DENSE, QUANTISED, plain, plain_quantisers
from train.score import pack_cases, score
from train.step import Trainer

WITNESS = torch.float64


@dataclasses.dataclass(frozen=True)
class Path:
    """One way to compute."""

    name: str
    numerics: Numerics
    functions: Functions
    gradients: bool = False  # compiled code of training, not its no-grad twin
    tf32: bool = False


@contextlib.contextmanager
def tf32(on: bool) -> Generator[None]:
    """Allow TF32 products inside, as ``set_float32_matmul_precision("high")`` would."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = on
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def paths(trainer: Trainer, *, quantised: bool, no_grad_compiled: bool) -> list[Path]:
    """Witness first."""
    base = QUANTISED if quantised else DENSE
    functions = trainer.quantised if quantised else trainer.functions
    routed = Functions()
    found = [
        Path("witness: plain, fp64 sums", dataclasses.replace(base, accumulate=WITNESS), routed),
        Path("plain, fp32 values and sums", dataclasses.replace(base, values=torch.float32), plain()),
        Path("plain, bf16", base, plain()),
        Path("plain, bf16, TF32 allowed", base, plain(), tf32=True),
        Path("compiled, training code", base, functions, gradients=True),
    ]
    if no_grad_compiled:
        found.append(Path("compiled, no-grad code", base, functions))
    return found


def compare(
    trainer: Trainer,
    cases: list[Case],
    encoder: Encoder,
    *,
    quantised: bool,
    rows: int,
    row: int,
    no_grad_compiled: bool,
) -> list[str]:
    """Lines of a table: path, exact cases, tokens, cases with logits rounded to bf16, errors and route flips by layer."""
    batches, places = pack_cases(cases, encoder, rows=rows, row=row)
    lines = []
    witness: list[Tensor] = []
    witness_routes: list[Tensor] = []
    layers = [f"layers.{layer.index}.streams" for layer in trainer.config.layers]
    for path in paths(trainer, quantised=quantised, no_grad_compiled=no_grad_compiled):
        start = time.time()
        values = trainer.parameters.values(quantised=quantised)
        weights = trainer.parameters.named(values)
        streams: list[Tensor] = []
        routes: list[Tensor] = []
        logits_of: list[Tensor] = []

        def forward(
            ids: Tensor,
            documents: Tensor,
            path: Path = path,
            weights: dict[str, Tensor] = weights,
            streams: list[Tensor] = streams,
            routes: list[Tensor] = routes,
            logits_of: list[Tensor] = logits_of,
        ) -> Tensor:
            trace: oracle.Trace = {}
            own = contextlib.nullcontext() if path.name.startswith("compiled") else plain_quantisers()
            with torch.set_grad_enabled(path.gradients), tf32(path.tf32), own:
                out = oracle.forward(
                    trainer.config, weights, ids, numerics=path.numerics,
                    token_map=trainer.token_map,  # ty: ignore[invalid-argument-type]
                    documents_BT=documents, trace=trace,
                    options=Options(functions=path.functions, dense=not quantised, detach_indexer=True),
                )  # fmt: skip
            streams.extend(trace[name].detach().float() for name in layers)
            routes.extend(trace[name.replace("streams", "route_e")].sort(-1).values for name in layers)
            assert out.logits_BTV is not None
            logits_of.append(out.logits_BTV.detach())
            return logits_of[-1]

        result = score(batches, places, forward, trainer.device)
        replay = iter(logits_of)
        rounded = score(batches, places, lambda *_, replay=replay: next(replay).bfloat16(), trainer.device)
        if not witness:
            witness, witness_routes = streams, routes
        real = [
            torch.from_numpy(b.weight > 0).to(trainer.device) for b in batches
        ]  # rows that predict answers
        errors, flips = [], []
        for index in range(len(layers)):
            a = torch.cat([w[m] for w, m in zip(witness[index :: len(layers)], real, strict=True)]).flatten(1)
            b = torch.cat([w[m] for w, m in zip(streams[index :: len(layers)], real, strict=True)]).flatten(1)
            errors.append(float(((a - b).norm(dim=1) / a.norm(dim=1)).median()))
            pairs = zip(witness_routes[index :: len(layers)], routes[index :: len(layers)], real, strict=True)
            flips.append(float(torch.cat([(x[m] != y[m]).any(-1).float() for x, y, m in pairs]).mean()))
        shown = " ".join(f"{e:.4f}" for e in errors)
        flipped = " ".join(f"{f:.1%}" for f in flips)
        lines.append(
            f"{path.name}: {result}; with bf16 logits {rounded.rate:.1%}; median row error by layer {shown}; "
            f"rows with another route {flipped} ({time.time() - start:.0f} s)"
        )
    return lines
