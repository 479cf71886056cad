"""Proves that the tests notice a broken part: ``python tests/mutations.py`` breaks one at a time and runs the fast tests.

Each mutation of spec/model.md 13 (x), and some more, is applied to the oracle and, in its own run, to the serving kernels;
a mutation is killed when a test fails. Prints a table and ends with 1 if one survived. ``tests/test_mutations.py`` applies
the same mutations in process.
"""

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # run as a script, the repository's root is not on the path

import pytest
import torch
from torch import Tensor

import flashstep.model.transformer as serving_transformer
from flashstep.kernels.attention import reference as attention
from flashstep.kernels.cast import reference as cast
from flashstep.kernels.engram import reference as engram
from flashstep.kernels.indexer import reference as indexer
from flashstep.kernels.mhc import reference as mhc
from flashstep.kernels.moe import reference as moe
from flashstep.kernels.norm_rope import reference as norm_rope
from flashstep.model.mhc import Site
from flashstep.quant import mxfp4, nvfp4
from oracle import model as oracle

Patch = Callable[[Any, str, Any], None]  # setattr, or pytest's monkeypatch.setattr

TESTS = {
    "oracle": ["tests/oracle/test_excerpt.py", "tests/oracle/test_model.py", "tests/oracle/test_vectors.py"],
    "serving": ["tests/model/test_transformer.py"],
}
SELECT = {
    "oracle": "foreign_layer_bit_for_bit or golden or clamp or (each_layer and a_base)",
    "serving": "test_every_length_in_one_batch and (A or D)",
}


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One broken part, as the oracle's and as the serving side's patch."""

    name: str
    oracle: Callable[[Patch], None]
    serving: Callable[[Patch], None]


# ---- the oracle -----------------------------------------------------------------------------------------------------


def use(patch: Patch, **functions: Any) -> None:
    """Let every forward of the oracle use these functions instead of its own."""
    forward = oracle.forward

    def mutated(*arguments: Any, options: oracle.Options = oracle.Options(), **more: Any) -> Any:  # noqa: B008
        changed = replace(options, functions=replace(options.functions, **functions))
        return forward(*arguments, options=changed, **more)

    patch(oracle, "forward", mutated)


def unchanged(x: Tensor) -> Tensor:
    return x


def oracle_no_sink(patch: Patch) -> None:
    attend = oracle.attend
    use(
        patch,
        attend=lambda call: attend(replace(call, sink_H=torch.full_like(call.sink_H, -math.inf))),
    )


def oracle_wide_window(patch: Patch) -> None:
    attend = oracle.attend
    use(patch, attend=lambda call: attend(replace(call, window=call.window + 1)))


def oracle_own_pre(patch: Patch) -> None:
    latest: list[Tensor] = []

    def coefficients(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        found = oracle.hc_coefficients(*arguments)
        latest[:] = [found[0]]
        return found

    def collapse(streams: Tensor, read: Tensor, numerics: oracle.Numerics) -> Tensor:
        return oracle.collapse(streams, latest[0], numerics)

    use(patch, hc_coefficients=coefficients, collapse=collapse)


def oracle_transposed(patch: Patch) -> None:
    def write(y: Tensor, streams: Tensor, post: Tensor, mix: Tensor, numerics: oracle.Numerics) -> Tensor:
        return oracle.write_streams(y, streams, post, mix.mT, numerics)

    use(patch, write_streams=write)


def oracle_no_yarn(patch: Patch) -> None:
    frequencies = oracle.rope_frequencies

    def plain(config: Any, *, compressed: bool) -> Tensor:
        if not compressed:
            return frequencies(config, compressed=False)
        return plain_frequencies(config)

    patch(oracle, "rope_frequencies", plain)


def plain_frequencies(config: Any) -> Tensor:
    pair = torch.arange(config.qk_rope_head_dim // 2, dtype=torch.float64)
    return (config.compress_rope_theta ** (-2 * pair / config.qk_rope_head_dim)).float()


def oracle_no_clamp(patch: Patch) -> None:
    swiglu = oracle.swiglu

    def free(gate: Tensor, up: Tensor, limit: float, *more: Any) -> Tensor:
        return swiglu(gate, up, math.inf, *more)

    patch(oracle, "swiglu", free)


def oracle_no_candidates(patch: Patch) -> None:
    def everything(scores: Tensor, newest: Tensor, config: Any) -> Tensor:
        return torch.ones_like(scores, dtype=torch.bool)

    use(patch, candidate_mask=everything)


# ---- the serving side -----------------------------------------------------------------------------------------------


def wrap(patch: Patch, module: Any, names: tuple[str, ...], **changes: Callable[[Any], Any]) -> None:
    """Change keyword arguments on their way into functions of a module."""
    for name in names:
        original = getattr(module, name)

        def mutated(*arguments: Any, original: Callable[..., Any] = original, **more: Any) -> Any:
            return original(
                *arguments, **{**more, **{key: change(more[key]) for key, change in changes.items()}}
            )

        patch(module, name, mutated)


ATTEND = ("attend_window", "attend_sparse")
SELECTS = ("select", "select_with_candidates", "select_within")


def serving_no_inverse(patch: Patch) -> None:
    patch(norm_rope, "rotate_inverse", lambda x, cos_TP, sin_TP: x)


def serving_own_pre(patch: Patch) -> None:
    collapse = Site.collapse
    patch(Site, "collapse", lambda self, x, pre: collapse(self, x, self.coefficients(x).pre_TS))


def serving_store(patch: Patch, name: str, first: Callable[[Tensor], Tensor]) -> None:
    """Records stay records, so a dropped quantiser is a wrong grid before the right one."""
    store = getattr(cast, name)
    patch(cast, name, lambda x, planes, *, slot_T: store(first(x), planes, slot_T=slot_T))


def serving_no_yarn(patch: Patch) -> None:
    patch(serving_transformer, "compressed_frequencies", plain_frequencies)


def serving_no_candidates(patch: Patch) -> None:
    select = indexer.select

    def within(*arguments: Any, candidates_TM: Tensor, block_size: int, **more: Any) -> Tensor:
        return select(*arguments, **more)

    patch(indexer, "select_within", within)


def serving_no_clamp(patch: Patch) -> None:
    wrap(patch, moe, ("swiglu", "experts"), limit=lambda limit: math.inf)


MUTATIONS = (
    Mutation(
        name="no sink",
        oracle=oracle_no_sink,
        serving=lambda patch: wrap(
            patch, attention, ATTEND, sink_H=lambda sink: torch.full_like(sink, -math.inf)
        ),
    ),
    Mutation(
        name="no inverse rotation",
        oracle=lambda patch: use(
            patch, inverse=lambda table: (torch.ones_like(table[0]), torch.zeros_like(table[1]))
        ),
        serving=serving_no_inverse,
    ),
    Mutation(name="mHC reads its own pre", oracle=oracle_own_pre, serving=serving_own_pre),
    Mutation(
        name="mHC mix transposed",
        oracle=oracle_transposed,
        serving=lambda patch: wrap(patch, mhc, ("write",), comb_TSS=lambda comb: comb.mT),
    ),
    Mutation(
        name="no Q8 on the window",
        oracle=lambda patch: use(patch, q8_window=unchanged),
        serving=lambda patch: serving_store(patch, "store_mxfp8", mxfp4.quantise_dequantise),
    ),
    Mutation(
        name="no QN4 on entries",
        oracle=lambda patch: use(patch, qn4_entries=unchanged),
        serving=lambda patch: serving_store(patch, "store_nvfp4", mxfp4.quantise_dequantise),
    ),
    Mutation(
        name="no QM4 on index keys and queries",
        oracle=lambda patch: use(patch, qm4_index=unchanged),
        serving=lambda patch: serving_store(patch, "store_mxfp4", nvfp4.quantise_dequantise),
    ),
    Mutation(
        name="no QM4 on index queries",
        oracle=lambda patch: use(patch, qm4_index=lambda x: x if x.dim() == 4 else oracle.qm4(x)),
        serving=lambda patch: patch(cast, "round_mxfp4", unchanged),
    ),
    Mutation(
        name="window of one more",
        oracle=oracle_wide_window,
        serving=lambda patch: wrap(patch, attention, ATTEND, width=lambda width: width + 1),
    ),
    Mutation(
        name="top-k of one more",
        oracle=lambda patch: use(patch, select_topk=lambda scores, k: oracle.select_topk(scores, k + 1)),
        serving=lambda patch: wrap(patch, indexer, SELECTS, count=lambda count: count + 1),
    ),
    Mutation(name="no YaRN", oracle=oracle_no_yarn, serving=serving_no_yarn),
    Mutation(name="no candidates", oracle=oracle_no_candidates, serving=serving_no_candidates),
    Mutation(name="no clamp", oracle=oracle_no_clamp, serving=serving_no_clamp),
    Mutation(
        name="no Engram",
        oracle=lambda patch: use(patch, engram_inject=lambda streams, *more: streams),
        serving=lambda patch: patch(engram, "inject", lambda x, kv, **more: x),
    ),
)


# ---- running --------------------------------------------------------------------------------------------------------


def run_tests(side: str, mutation: str | None) -> tuple[bool, str, float]:
    """Whether the side's tests passed under the mutation (None: unbroken), the first failure, and the seconds."""
    command = [sys.executable, str(Path(__file__)), "--side", side]
    command += ["--apply", mutation] if mutation else ["--unbroken"]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"the tests did not run under {mutation!r}:\n{done.stdout}\n{done.stderr}")
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    first = failures[0].split(" ")[1].rpartition("/")[2] if failures else ""
    return done.returncode == pytest.ExitCode.OK, first, time.monotonic() - start


def run_mutated(side: str, name: str | None) -> int:
    """In the subprocess: break the part, then run the tests."""
    torch.set_num_threads(1)
    for mutation in MUTATIONS:
        if mutation.name == name:
            getattr(mutation, side)(setattr)
    quiet = ["-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:randomly"]
    return pytest.main([*quiet, "-k", SELECT[side], *TESTS[side]])


def main() -> int:
    """Print which test kills which mutation; 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=("oracle", "serving", "both"), default="both")
    parser.add_argument("--apply", choices=[m.name for m in MUTATIONS])
    parser.add_argument("--unbroken", action="store_true")
    options = parser.parse_args()
    if options.apply or options.unbroken:
        return run_mutated(options.side, options.apply)
    survivors = []
    print(f"{'mutation':34}{'side':10}{'killed by':86}{'s':>6}")  # noqa: T201
    for side in TESTS if options.side == "both" else (options.side,):
        for name in (None, *(m.name for m in MUTATIONS)):
            passed, first, seconds = run_tests(side, name)
            if name is None and not passed:
                raise SystemExit(f"the unbroken {side} tests fail already: {first}")
            if name is not None and passed:
                survivors.append((name, side))
            verdict = first or ("(passes, as it must)" if name is None else "SURVIVED")
            print(f"{name or 'none':34}{side:10}{verdict:86}{seconds:6.1f}", flush=True)  # noqa: T201
    print(f"{len(survivors)} of {2 * len(MUTATIONS)} survived" if survivors else "every mutation was killed")  # noqa: T201
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
