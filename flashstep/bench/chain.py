"""The op chain (spec/serving.md E1): what a few small kernels cost inside one graph, and nothing else.

For each layer the router of this engine (GEMM, then scores and top-k) and a small consumer whose output is the next layer's
input; all layers are one captured graph, and events stand around its replays. Takes a ``Shape`` and a number of tokens, gives
microseconds of each replay. On a CPU the same chain is the references, run one after the other. Knows no model.
"""

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from flashstep.bench.graph import CapturedGraph
from flashstep.kernels import Ops, choose_ops
from flashstep.kernels.device import pick_device
from flashstep.kernels.jit import cuda_library, launched, programmatic
from flashstep.kernels.moe import SOFTMAX, SQRT_SOFTPLUS

SOURCE = Path(__file__).with_suffix(".cu")
REPLAYS = 21
TOKENS = (1, 16, 48)
EXTENSIBLE, ATTRIBUTE = 1, 2  # ways to launch a consumer, as SOURCE numbers them; 0 is the triple chevron


class Shape(NamedTuple):
    """A model's routers: ``layers`` of ``experts``, of which a row of ``hidden`` channels takes ``chosen``."""

    experts: int
    chosen: int
    hidden: int
    layers: int
    scoring: str = SOFTMAX

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Read EXPERTS/CHOSEN/HIDDEN/LAYERS[/SCORING]; ``ValueError`` for anything else."""
        *numbers, scoring = text.split("/") if text.count("/") == 4 else [*text.split("/"), SOFTMAX]
        if len(numbers) != 4 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
            raise ValueError(
                f"it is {text!r}; it is written EXPERTS/CHOSEN/HIDDEN/LAYERS[/SCORING], as 384/6/5120/40"
            )
        if scoring not in (SOFTMAX, SQRT_SOFTPLUS):
            raise ValueError(f"{text} scores by {scoring!r}; allowed are {SOFTMAX} and {SQRT_SOFTPLUS}")
        experts, chosen, hidden, layers = map(int, numbers)
        if chosen > experts:
            raise ValueError(f"{text} chooses {chosen} of {experts} experts")
        return cls(experts, chosen, hidden, layers, scoring)

    @property
    def name(self) -> str:
        return "/".join(map(str, self))


SHAPES = (
    Shape(512, 10, 2560, 48),
    Shape(128, 8, 2048, 48),
    Shape(64, 8, 2048, 16),
    Shape(384, 6, 5120, 40, SQRT_SOFTPLUS),  # V4.1's layers, and its draft's experts as often
    Shape(128, 3, 5120, 40, SQRT_SOFTPLUS),
)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One chain: microseconds of each replay; ``kernels`` launched and ``programmatic`` edges of its graph, None on a CPU."""

    shape: str
    layers: int
    tokens: int
    us: tuple[float, ...]
    kernels: int | None = None
    programmatic: int | None = None

    @property
    def name(self) -> str:
        return f"{self.shape} x {self.tokens}"

    @property
    def median_us(self) -> float:
        return statistics.median(self.us)


def measure(
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    *,
    replays: int,
    device: str = "auto",
    kernels: str = "auto",
) -> Iterator[Measured]:
    """Every shape at every number of tokens, one after the other."""
    place = pick_device(device)
    ops = choose_ops(place, kernels=kernels)
    warm_up(place)
    for shape in shapes:
        for count in tokens:
            work, _ = router_chain(shape, tokens=count, ops=ops, device=place)
            graph = CapturedGraph(work) if place.type == "cuda" else None
            facts = None if graph is None else graph.facts()
            yield Measured(
                shape=shape.name,
                layers=shape.layers,
                tokens=count,
                us=tuple(timed(work if graph is None else graph.replay, replays=replays, device=place)),
                kernels=None if facts is None else facts.kernels,
                programmatic=None if facts is None else facts.programmatic,
            )


def router_chain(
    shape: Shape, *, tokens: int, ops: Ops, device: torch.device
) -> tuple[Callable[[], None], list[Tensor]]:
    """The work of all layers: route, then weigh the first input by the first routing weight into the next layer's input.

    Also gives each layer's input bf16 [tokens, hidden], the last one's output included, for checks.
    """
    experts, chosen, hidden, layers, scoring = shape
    moe = ops.moe
    generator = torch.Generator(device).manual_seed(1)
    gates = [
        moe.prepare_gate(
            (torch.randn(experts, hidden, device=device, generator=generator) * hidden**-0.5).bfloat16()
        )
        for _ in range(layers)
    ]
    bias_E = torch.randn(experts, device=device, generator=generator) * 0.01
    inputs = [torch.randn(tokens, hidden, device=device, generator=generator).bfloat16()]
    inputs += [torch.empty_like(inputs[0]) for _ in range(layers)]
    consume = _consumer(inputs[0], chosen)

    def work() -> None:
        for layer, gate in enumerate(gates):
            _, weights_TK = moe.route(
                inputs[layer], gate, bias_E=bias_E, count=chosen, scale=1.0, temperature=1.0, scoring=scoring
            )
            consume(weights_TK, inputs[layer + 1])

    return work, inputs


def _consumer(first_TD: Tensor, chosen: int) -> Callable[[Tensor, Tensor], None]:
    """What writes ``first_TD`` times each row's first weight into an output."""
    tokens, hidden = first_TD.shape
    device = first_TD.device
    if device.type == "cpu":

        def plain(weights_TK: Tensor, out_TD: Tensor) -> None:
            out_TD.copy_(first_TD.float() * weights_TK[:, :1])

        return plain
    library = cuda_library(SOURCE)

    def consume(weights_TK: Tensor, out_TD: Tensor) -> None:
        launched(
            "consume_rows",
            library.consume_rows(
                ctypes.c_void_p(first_TD.data_ptr()),
                ctypes.c_void_p(weights_TK.data_ptr()),
                ctypes.c_void_p(out_TD.data_ptr()),
                tokens,
                hidden,
                chosen,
                ATTRIBUTE if programmatic(device) else EXTENSIBLE,
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            ),
        )

    return consume


def timed(work: Callable[[], object], *, replays: int, device: torch.device) -> list[float]:
    """Microseconds of each of ``replays`` runs of ``work``, behind one that does not count."""
    work()
    if device.type == "cpu":
        marks = [time.perf_counter()]
        for _ in range(replays):
            work()
            marks.append(time.perf_counter())
        return [1e6 * (after - before) for before, after in itertools.pairwise(marks)]
    events = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        events.append((start, end))
    torch.cuda.current_stream().synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in events]


def warm_up(device: torch.device) -> None:
    """About 0.1 s of work, so that a GPU's clocks come up before anything is timed."""
    if device.type == "cpu":
        return
    matrix = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    for _ in range(300):
        torch.mm(matrix, matrix)
    torch.cuda.current_stream().synchronize()
