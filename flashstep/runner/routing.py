"""Expert routing for measurements, step by step: which experts rows are sent to instead, and where loads are recorded.

Built from an ``EngineConfig``; the runner says before each forward how many rows it has, and takes the counted loads behind it.
Experts go to the device as the ends of their runs, layers x experts numbers, queued in the stream before the step: neither a
captured step nor one that the device decides waits for them. Knows no layer. Suffixes: ``model.routing``.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from flashstep.config.engine import EngineConfig
from flashstep.config.model import ModelConfig
from flashstep.model.routing import Routing, Taps
from flashstep.parallel.balance import balancedness, scaled, uniform
from flashstep.parallel.layout import DEP, Layout
from flashstep.parallel.loads import Header, Loads, LoadsError, LoadsWriter, Moe, StepLoads, read
from flashstep.runner.staging import Returning, to_device

WINDOW = 100  # steps whose loads are added up for the gauge
PARTS = 8  # that loads of experts are held against, where no layout says it
CYCLE = 64  # steps of uniform routing that differ
KEPT, KEPT_PICKS = 512, 16  # steps with their rows that are worked out once; numbers of rows


class Source(Protocol):
    """Loads by step, int64 [L, E], for any number of rows; ``period`` steps differ."""

    period: int

    def loads(self, step: int, rows: int) -> np.ndarray: ...


class Uniform:
    """Equal loads (``parallel.balance.uniform``), of other experts in each step and layer."""

    period = CYCLE

    def __init__(self, moe: Moe, *, seed: int) -> None:
        self._moe = moe
        self._seed = seed

    def loads(self, step: int, rows: int) -> np.ndarray:
        moe = self._moe
        seed = (self._seed, step, rows)
        return uniform(rows=rows, layers=moe.layers, experts=moe.experts, chosen=moe.chosen, seed=seed)


class Recorded:
    """The steps of a file in their order, again and again, scaled to the rows that there are."""

    def __init__(self, moe: Moe, steps: Sequence[np.ndarray]) -> None:
        self._moe = moe
        self._steps = steps
        self.period = len(steps)

    def loads(self, step: int, rows: int) -> np.ndarray:
        return scaled(self._steps[step], rows=rows, chosen=self._moe.chosen)


class Assigner:
    """Puts the loads of ``source`` into ``taps``, a step of it for each forward.

    ``first_tail_layer`` is where the layers begin that rows of a prompt may leave out (bounded replay).
    """

    def __init__(self, taps: Taps, source: Source, *, first_tail_layer: int, device: torch.device) -> None:
        self._taps = taps
        self._source = source
        self._tail = first_tail_layer
        self._device = device
        self._step = 0
        self._ends = lru_cache(KEPT)(self._worked_out)
        self._picks = lru_cache(KEPT_PICKS)(self._picks_of)

    def assign(self, rows: int, *, tail_rows: int | None = None) -> None:
        """Of the next forward, of ``rows`` rows, of which ``tail_rows`` run past the last KV source (None: all)."""
        step, self._step = self._step, (self._step + 1) % self._source.period
        if tail_rows is None or tail_rows == rows:
            self._taps.assign(self._ends(step, rows), self._picks(rows))
            return
        head, tail = self._ends(step, rows)[: self._tail], self._ends(step, max(tail_rows, 1))[self._tail :]
        self._taps.assign(head, self._picks(rows)[: self._tail])
        self._taps.assign(tail, self._picks(max(tail_rows, 1))[self._tail :], first_layer=self._tail)

    def _worked_out(self, step: int, rows: int) -> Tensor:
        return to_device(self._source.loads(step, rows).cumsum(1), self._device)

    def _picks_of(self, rows: int) -> Tensor:
        """Pick p goes to row p modulo ``rows`` (``parallel.balance.chosen_experts``)."""
        pick_KR = np.arange(rows * self._taps.chosen).reshape(self._taps.chosen, rows)
        pick_LP = np.broadcast_to(pick_KR.T.reshape(1, -1), (self._taps.layers, pick_KR.size))
        return to_device(pick_LP, self._device)


class Counted(NamedTuple):
    """Loads of one step on their way to the host."""

    target: Returning
    draft: Returning | None


class ExpertRouting:
    """What the runner asks; ``routing`` are the taps that the model is built with."""

    def __init__(
        self,
        routing: Routing,
        *,
        target: Assigner | None,
        draft: Assigner | None,
        writer: LoadsWriter | None,
        parts: int,
    ) -> None:
        self.routing = routing
        self._target = target
        self._draft = draft
        self._writer = writer
        self._parts = parts
        self._recorded = 0
        self._window: deque[np.ndarray] = deque()  # loads of the newest steps, and their sum
        self._sum_LE: np.ndarray | int = 0
        self.balancedness: float | None = None  # of the newest ``WINDOW`` steps; None: nothing is recorded

    def assign(self, rows: int, *, tail_rows: int | None = None) -> None:
        """Before a forward of the target; rows that pad it count."""
        if self._target is not None:
            self._target.assign(rows, tail_rows=tail_rows)

    def assign_drafts(self, rows: int) -> None:
        """Before a pass of the draft, of all places of all blocks."""
        if self._draft is not None:
            self._draft.assign(rows)

    def counted(self, *, drafted: bool) -> Counted | None:
        """Behind a step: its loads, as they are when the stream comes to this point; None if nobody records."""
        target, draft = self.routing.target.counts_LE, self.routing.draft
        if target is None:
            return None
        draft_LE = draft.counts_LE if drafted and draft is not None else None
        return Counted(Returning(target), None if draft_LE is None else Returning(draft_LE))

    def record(self, counted: Counted | None) -> None:
        """Write down what ``counted`` gave; waits for it. In the order of steps."""
        if counted is None:
            return
        assert self._writer is not None
        target = counted.target.wait()
        rows = int(target.sum(1).max(initial=0)) // self.routing.target.chosen
        draft = None if counted.draft is None else counted.draft.wait()
        self._writer.write(StepLoads(self._recorded, rows, target, draft))
        self._recorded += 1
        self._window.append(target.copy())
        self._sum_LE = self._sum_LE + self._window[-1]
        if len(self._window) > WINDOW:
            self._sum_LE = self._sum_LE - self._window.popleft()
        self.balancedness = balancedness(self._sum_LE, parts=self._parts)


def problems(config: EngineConfig, model: ModelConfig) -> list[str]:
    """Why ``config`` cannot route as it says, in sentences."""
    if config.expert_loads is None:
        return []
    try:
        loads = read(config.expert_loads)
    except (LoadsError, OSError) as error:
        return [str(error)]
    found, target, draft = [], *_moes(config, model)
    for name, mine, theirs in (
        ("the model", target, loads.header.target),
        ("its draft", draft, loads.header.draft),
    ):
        if mine is not None and mine != theirs:
            has = "none" if theirs is None else _words(theirs)
            found.append(f"{config.expert_loads} has loads of {has}; {name} has {_words(mine)}")
    if not loads.steps:
        found.append(f"{config.expert_loads} has no step")
    elif draft is not None and loads.header.draft is not None and not _draft_steps(loads):
        found.append(f"{config.expert_loads} has no step with drafts, and this engine drafts")
    return found


def routing_of(
    config: EngineConfig, model: ModelConfig, *, layout: Layout, device: torch.device
) -> ExpertRouting | None:
    """What ``config`` asks for; None: routers are left alone and nobody counts."""
    if config.routing == "real" and config.record_expert_loads is None:
        return None
    moes = _moes(config, model)
    block = model.dspark_block_size
    rows = max(config.max_num_batched_tokens, config.max_num_seqs * (1 + block))
    assigns, counts = config.routing != "real", config.record_expert_loads is not None
    taps = [
        None
        if moe is None
        else Taps(
            layers=moe.layers,
            experts=moe.experts,
            chosen=moe.chosen,
            rows=most,
            assigns=assigns,
            counts=counts,
            device=device,
        )
        for moe, most in zip(moes, (rows, config.max_num_seqs * block), strict=True)
    ]
    target, draft = taps
    assert target is not None
    tail = 0 if model.last_kv_source is None else model.last_kv_source
    sources = _sources(config, moes) if assigns else (None, None)
    assigners = [
        None if tap is None or source is None else Assigner(tap, source, first_tail_layer=tail, device=device)
        for tap, source in zip(taps, sources, strict=True)
    ]
    writer = None
    if config.record_expert_loads is not None:
        header = Header(
            model=config.model.resolve().name,
            target=moes[0],
            draft=moes[1],
            layout="whole" if config.emulate is None else layout.name,
            routing=config.routing,
        )
        writer = LoadsWriter(config.record_expert_loads, header)
    return ExpertRouting(
        Routing(target, draft),
        target=assigners[0],
        draft=assigners[1],
        writer=writer,
        parts=parts_of(layout, experts=model.n_routed_experts),
    )


def parts_of(layout: Layout, *, experts: int) -> int:
    """Parts that ``layout`` deals the experts out to; where they stay together, ``PARTS``, or the next fewer that shares them."""
    if layout.kind == DEP:
        return layout.size
    return next(parts for parts in range(min(PARTS, experts), 0, -1) if experts % parts == 0)


def _sources(config: EngineConfig, moes: tuple[Moe, Moe | None]) -> tuple[Source, Source | None]:
    target, draft = moes
    if config.expert_loads is None:
        return Uniform(target, seed=config.seed), None if draft is None else Uniform(
            draft, seed=config.seed + 1
        )
    loads = read(config.expert_loads)
    drafted = None if draft is None else Recorded(draft, _draft_steps(loads))
    return Recorded(target, [step.target for step in loads.steps]), drafted


def _draft_steps(loads: Loads) -> list[np.ndarray]:
    return [step.draft for step in loads.steps if step.draft is not None]


def _moes(config: EngineConfig, model: ModelConfig) -> tuple[Moe, Moe | None]:
    """The layers with experts of the target and, where it is used, of the draft."""
    target = Moe(model.num_hidden_layers, model.n_routed_experts, model.num_experts_per_tok)
    if config.speculative is None or not model.num_nextn_predict_layers:
        return target, None
    draft = Moe(
        model.num_nextn_predict_layers, model.dspark_n_routed_experts, model.dspark_num_experts_per_tok
    )
    return target, draft


def _words(moe: Moe) -> str:
    return f"{moe.layers} layers of {moe.experts} experts, {moe.chosen} a row"
