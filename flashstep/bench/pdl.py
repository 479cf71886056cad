"""``flashstep bench pdl``: what the programmatic-serialization attribute costs and brings on this device (spec/serving.md E.2).

Two chains. *pairs*: 48 times (plain kernel, consumer), launched in the ways that a program may choose between. *router*: for
each layer the router of this engine and a small consumer whose output is the next layer's input, with programmatic launches and
without. Both are counted (edges of the captured graph) and timed: rounds in A B B A order, the median of 21 replays each,
differences paired.
"""

import ctypes
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flashstep.bench.graph import CapturedGraph, GraphFacts
from flashstep.kernels import choose_ops
from flashstep.kernels.jit import cuda_library, launched, programmatic, without_programmatic_launches

SOURCE = Path(__file__).with_suffix(".cu")
PAIRS = 48
FLOATS = 65_536
REPLAYS = 21
ROUNDS = 6
CHEVRON, EXTENSIBLE, ATTRIBUTE = 0, 1, 2
WAYS = {  # name -> (producer's function, way of the first consumer, way of the others)
    "triple chevron": ("produce", CHEVRON, CHEVRON),
    "extensible launch": ("produce", EXTENSIBLE, EXTENSIBLE),
    "extensible launch + attribute": ("produce", ATTRIBUTE, ATTRIBUTE),
    "attribute on the first consumer only": ("produce", ATTRIBUTE, EXTENSIBLE),
    "attribute, producer triggers early": ("produce_early", ATTRIBUTE, ATTRIBUTE),
}
SHAPES = (  # experts, top-k, hidden, layers, scoring
    (512, 10, 2560, 48, "softmax"),
    (128, 8, 2048, 48, "softmax"),
    (64, 8, 2048, 16, "softmax"),
    (384, 6, 5120, 40, "sqrt_softplus"),
    (128, 3, 5120, 40, "sqrt_softplus"),
)
TOKENS = (1, 16, 48)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One arm: microseconds of the whole chain by round, and what its graph is made of (None: not a graph)."""

    chain: str
    arm: str
    us: tuple[float, ...]
    units: int  # pairs or layers
    facts: GraphFacts | None

    @property
    def median_us(self) -> float:
        return statistics.median(self.us)


def measure(*, rounds: int = ROUNDS) -> Iterator[Measured]:
    """Every arm of every chain on the CUDA device, chain by chain. ``ValueError`` where there is none."""
    if not torch.cuda.is_available():
        raise ValueError("bench pdl measures launches of a CUDA device, and this machine has none")
    _warm_up()
    yield from _pairs(rounds=rounds)
    for shape in SHAPES:
        for tokens in TOKENS:
            yield from _router(*shape, tokens=tokens, rounds=rounds)


def paired_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Median over the rounds of b - a, in what they are in."""
    return statistics.median(late - early for early, late in zip(a, b, strict=True))


def _pairs(*, rounds: int) -> list[Measured]:
    library = cuda_library(SOURCE)
    x = torch.rand(FLOATS, device="cuda")

    def chain(producer: str, first: int, others: int) -> Callable[[], None]:
        produce, consume = library[producer], library["consume"]
        producer_way = ATTRIBUTE if producer == "produce_early" else CHEVRON

        def work() -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            address, count = ctypes.c_void_p(x.data_ptr()), ctypes.c_int(FLOATS)
            for pair in range(PAIRS):
                launched("produce", produce(address, count, ctypes.c_int(producer_way), stream))
                launched("consume", consume(address, count, ctypes.c_int(others if pair else first), stream))

        return work

    works = {name: chain(*way) for name, way in WAYS.items()}
    graphs = {name: CapturedGraph(work) for name, work in works.items()}
    arms: dict[str, Callable[[], object]] = {f"{name}, graph": graph.replay for name, graph in graphs.items()}
    arms |= {f"{name}, eager": work for name, work in works.items()}
    times = _interleaved(arms, rounds=rounds)
    return [
        Measured(
            chain=f"{PAIRS} pairs, {how}",
            arm=name,
            us=times[f"{name}, {how}"],
            units=PAIRS,
            facts=graph.facts() if how == "graph" else None,
        )
        for how in ("graph", "eager")
        for name, graph in graphs.items()
    ]


def _router(
    experts: int, count: int, hidden: int, layers: int, scoring: str, *, tokens: int, rounds: int
) -> list[Measured]:
    work, _ = router_chain(experts, count, hidden, layers, scoring, tokens=tokens)
    with without_programmatic_launches():
        plain = CapturedGraph(work)
    graphs = {"plain launches": plain, "programmatic launches": CapturedGraph(work)}
    times = _interleaved({name: graph.replay for name, graph in graphs.items()}, rounds=rounds)
    return [
        Measured(
            chain=f"router {experts}/{count}/{hidden}/{layers} {scoring}, {tokens} tokens",
            arm=name,
            us=times[name],
            units=layers,
            facts=graph.facts(),
        )
        for name, graph in graphs.items()
    ]


def router_chain(
    experts: int, count: int, hidden: int, layers: int, scoring: str, *, tokens: int
) -> tuple[Callable[[], None], list[Tensor]]:
    """The work of all layers: route, then weigh the first input by the first routing weight into the next layer's input.

    Also gives each layer's input bf16 [tokens, hidden], the last one's output included, for checks.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    library, moe = cuda_library(SOURCE), choose_ops(device).moe
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

    def work() -> None:
        way = ATTRIBUTE if programmatic(device) else EXTENSIBLE
        for layer, gate in enumerate(gates):
            _, weights_TK = moe.route(
                inputs[layer], gate, bias_E=bias_E, count=count, scale=1.0, temperature=1.0, scoring=scoring
            )
            launched(
                "consume_rows",
                library.consume_rows(
                    ctypes.c_void_p(inputs[0].data_ptr()),
                    ctypes.c_void_p(weights_TK.data_ptr()),
                    ctypes.c_void_p(inputs[layer + 1].data_ptr()),
                    tokens,
                    hidden,
                    count,
                    way,
                    ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
                ),
            )

    return work, inputs


def _interleaved(arms: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, tuple[float, ...]]:
    """Microseconds of one run of each arm, a median of ``REPLAYS`` for each round; every other round runs them backwards."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in reversed(arms) if number % 2 else arms:
            times[name].append(statistics.median(_timed(arms[name])))
    return {name: tuple(us) for name, us in times.items()}


def _timed(work: Callable[[], object]) -> list[float]:
    work()
    marks = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        marks.append((start, end))
    torch.cuda.current_stream().synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in marks]


def _warm_up() -> None:
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(300):  # about 0.1 s: the clocks come up before anything is timed
        torch.mm(matrix, matrix)
    torch.cuda.current_stream().synchronize()
