"""``flashstep bench pdl``: what the programmatic-serialization attribute costs and brings on this device (spec/serving.md E.2).

Two chains. *pairs*: 48 times (plain kernel, consumer), launched in the ways that a program may choose between. *router*: for
each layer the router of this engine and a small consumer whose output is the next layer's input, with programmatic launches and
without. Both are counted (edges of the captured graph) and timed: rounds in A B B A order, the median of 21 replays each,
differences paired.
"""

import ctypes
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from flashstep.bench.chain import (
    ATTRIBUTE,
    EXTENSIBLE,
    REPLAYS,
    SHAPES,
    SOURCE,
    TOKENS,
    Shape,
    router_chain,
    timed,
    warm_up,
)
from flashstep.bench.graph import CapturedGraph, GraphFacts
from flashstep.bench.ledger import Entry, Samples
from flashstep.bench.origin import origin
from flashstep.kernels import choose_ops
from flashstep.kernels.jit import cuda_library, launched, without_programmatic_launches

PAIRS = 48
FLOATS = 65_536
ROUNDS = 6
CHEVRON = 0
WAYS = {  # name -> (producer's function, way of the first consumer, way of the others)
    "triple chevron": ("produce", CHEVRON, CHEVRON),
    "extensible launch": ("produce", EXTENSIBLE, EXTENSIBLE),
    "extensible launch + attribute": ("produce", ATTRIBUTE, ATTRIBUTE),
    "attribute on the first consumer only": ("produce", ATTRIBUTE, EXTENSIBLE),
    "attribute, producer triggers early": ("produce_early", ATTRIBUTE, ATTRIBUTE),
}


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
    warm_up(_device())
    yield from _pairs(rounds=rounds)
    for shape in SHAPES:
        for tokens in TOKENS:
            yield from _router(shape, tokens=tokens, rounds=rounds)


def entry(measured: Sequence[Measured], *, rounds: int, faults: tuple[str, ...]) -> Entry:
    """For the ledger: a sample for each round of each arm, its key the chain, the arm and the round."""
    samples = {
        f"{item.chain} / {item.arm} #{number}": us for item in measured for number, us in enumerate(item.us)
    }
    return Entry(
        kind="pdl",
        origin=origin(),
        settings={"rounds": rounds, "replays": REPLAYS},
        subject={"device": str(_device())},
        samples=Samples(unit="replay", keys=tuple(samples), columns={"chain_us": tuple(samples.values())}),
        metrics={"chain_us": statistics.fmean(item.median_us for item in measured)} if measured else {},
        detail={"arms": [asdict(item) for item in measured]},
        faults=faults,
        complete=not faults,
    )


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


def _router(shape: Shape, *, tokens: int, rounds: int) -> list[Measured]:
    work, _ = router_chain(shape, tokens=tokens, ops=choose_ops(_device()), device=_device())
    with without_programmatic_launches():
        plain = CapturedGraph(work)
    graphs = {"plain launches": plain, "programmatic launches": CapturedGraph(work)}
    times = _interleaved({name: graph.replay for name, graph in graphs.items()}, rounds=rounds)
    return [
        Measured(
            chain=f"router {shape.name}, {tokens} tokens",
            arm=name,
            us=times[name],
            units=shape.layers,
            facts=graph.facts(),
        )
        for name, graph in graphs.items()
    ]


def _interleaved(arms: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, tuple[float, ...]]:
    """Microseconds of one run of each arm, a median of ``REPLAYS`` for each round; every other round runs them backwards."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in reversed(arms) if number % 2 else arms:
            times[name].append(statistics.median(timed(arms[name], replays=REPLAYS, device=_device())))
    return {name: tuple(us) for name, us in times.items()}


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
