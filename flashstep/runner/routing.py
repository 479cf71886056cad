"""Expert routing for measurements, step by step: which experts rows are sent to instead, and where loads are recorded.

Built from an ``EngineConfig``; the runner says before each forward how many rows it has, and takes the counted loads behind it.
Experts go to the device as the ends of their runs, layers x experts numbers, queued in the stream before the step: neither a
captured step nor one that the device decides waits for them. Knows no layer. Suffixes: ``model.routing``.
"""

from collections import deque
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flashstep.cache.filled import FilledCache
from flashstep.config.engine import EngineConfig
from flashstep.config.errors import ConfigError
from flashstep.config.model import ModelConfig
from flashstep.model.routing import Routing, Taps
from flashstep.parallel.balance import balancedness
from flashstep.parallel.layout import DEP, Layout
from flashstep.parallel.loads import COUNTS, Header, LoadsError, LoadsWriter, Moe, StepLoads, read
from flashstep.runner.sources import CYCLE, Recorded, Source, Uniform
from flashstep.runner.staging import Returning, to_device
from flashstep.telemetry.log import Log

WINDOW = 100  # steps whose loads are added up for the gauge
PARTS = 8  # that loads of experts are held against, where no layout says it
KEPT, KEPT_PICKS = (
    2 * CYCLE,
    16,
)  # steps with their rows that are worked out once, and read once; numbers of rows
log = Log("routing")


class Assigner:
    """Puts the loads of ``source`` into ``taps``, a step of it for each forward.

    ``first_tail_layer`` is where the layers begin that rows of a prompt may leave out (bounded replay).
    """

    def __init__(self, taps: Taps, source: Source, *, first_tail_layer: int, device: torch.device) -> None:
        self._taps = taps
        self.source = source
        self._tail = first_tail_layer
        self._device = device
        self._step = 0
        self._ends = lru_cache(KEPT)(self._worked_out)
        self._picks = lru_cache(KEPT_PICKS)(self._picks_of)

    def assign(self, rows: int, *, tail_rows: int | None = None) -> None:
        """Of the next forward, of ``rows`` rows, of which ``tail_rows`` run past the last KV source (None: all)."""
        step, self._step = self._step, (self._step + 1) % self.source.period
        if tail_rows is None or tail_rows == rows:
            self._taps.assign(self._ends(step, rows, 0, self._taps.layers), self._picks(rows))
            return
        tail_rows = max(tail_rows, 1)
        self._taps.assign(self._ends(step, rows, 0, self._tail), self._picks(rows))
        tail = self._ends(step, tail_rows, self._tail, self._taps.layers)
        self._taps.assign(tail, self._picks(tail_rows), first_layer=self._tail)

    def _worked_out(self, step: int, rows: int, first: int, end: int) -> Tensor:
        ends_LE = self.source.loads(step, rows, slice(first, end)).cumsum(1)
        return to_device(ends_LE.astype(np.int32), self._device)

    def _picks_of(self, rows: int) -> Tensor:
        """Pick p goes to row p modulo ``rows`` (``parallel.balance.chosen_experts``)."""
        pick_KR = np.arange(rows * self._taps.chosen, dtype=np.int32).reshape(self._taps.chosen, rows)
        return to_device(pick_KR.T.flatten(), self._device)


class Counted(NamedTuple):
    """Loads of one step on their way to the host."""

    target: Returning
    draft: Returning | None


class ExpertRouting:
    """What the runner asks, and, without ``taps``, nothing that it does: routers choose, and nobody counts.

    ``taps`` are those that the model is built with.
    """

    def __init__(
        self,
        taps: Routing | None = None,
        *,
        target: Assigner | None = None,
        draft: Assigner | None = None,
        recording: "Recording | None" = None,
    ) -> None:
        self.taps = taps
        self._target = target
        self._draft = draft
        self._recording = recording

    @property
    def balancedness(self) -> float | None:
        """Of the newest ``WINDOW`` recorded steps; None: nothing is recorded."""
        return None if self._recording is None else self._recording.balancedness

    @property
    def recorded(self) -> Path | None:
        """The file that loads are written to."""
        return None if self._recording is None else self._recording.path

    @property
    def steps(self) -> int:
        """Steps that were recorded so far."""
        return 0 if self._recording is None else self._recording.steps

    @property
    def replayed(self) -> Recorded | None:
        """Where the target's recorded loads come from, and how they were made to fit."""
        source = None if self._target is None else self._target.source
        return source if isinstance(source, Recorded) else None

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
        if self.taps is None or self.taps.target.counts_LE is None:
            return None
        draft = self.taps.draft
        draft_LE = draft.counts_LE if drafted and draft is not None else None
        return Counted(
            Returning(self.taps.target.counts_LE), None if draft_LE is None else Returning(draft_LE)
        )

    def record(self, counted: Counted | None) -> None:
        """Write down what ``counted`` gave; waits for it. In the order of steps."""
        if counted is not None and self._recording is not None:
            self._recording.add(counted)


class Measuring(NamedTuple):
    """What a runner does for measurements only; by default nothing. ``filled`` None: nobody hands records over."""

    routing: ExpertRouting = ExpertRouting()
    filled: FilledCache | None = None


NOTHING_MEASURED = Measuring()


class Recording:
    """Loads on their way into a file, and how even the newest were. A file that cannot be written to ends that, nothing else."""

    def __init__(self, writer: LoadsWriter, *, parts: int) -> None:
        self.path = writer.path
        self.balancedness: float | None = None
        self._writer: LoadsWriter | None = writer
        self._chosen = writer.header.target.chosen
        self._parts = parts
        self.steps = 0
        self._window: deque[np.ndarray] = deque()  # loads of the newest steps, and their sum
        self._sum_LE: np.ndarray | int = 0

    def add(self, counted: Counted) -> None:
        target = counted.target.wait()
        rows = int(target.sum(1).max(initial=0)) // self._chosen
        self._write(
            StepLoads(self.steps, rows, target, None if counted.draft is None else counted.draft.wait())
        )
        self.steps += 1
        self._window.append(target.astype(COUNTS))
        self._sum_LE = self._sum_LE + target
        if len(self._window) > WINDOW:
            self._sum_LE = self._sum_LE - self._window.popleft()
        self.balancedness = balancedness(self._sum_LE, parts=self._parts)

    def _write(self, loads: StepLoads) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write(loads)
        except OSError as error:
            log.error(  # noqa: TRY400 - a full disk needs no traceback
                "expert loads are recorded no more", path=str(self.path), steps=self.steps, error=str(error)
            )
            self._writer.close()
            self._writer = None


def problems(config: EngineConfig, model: ModelConfig) -> list[str]:
    """Why ``config`` cannot route as it says, in sentences."""
    if config.expert_loads is None:
        return []
    found, target, draft = [], *_moes(config, model)
    drafts = False
    try:
        loads = read(config.expert_loads)
        for step in loads.steps:
            drafts = drafts or step.draft is not None
    except (LoadsError, OSError) as error:
        return [str(error)]
    for name, mine, theirs in (
        ("the model", target, loads.header.target),
        ("its draft", draft, loads.header.draft),
    ):
        if mine is not None and mine != theirs:
            has = "none" if theirs is None else _words(theirs)
            found.append(f"{config.expert_loads} has loads of {has}; {name} has {_words(mine)}")
    if not loads.steps:
        found.append(f"{config.expert_loads} has no step")
    elif draft is not None and loads.header.draft is not None and not drafts:
        found.append(f"{config.expert_loads} has no step with drafts, and this engine drafts")
    return found


def routing_of(
    config: EngineConfig, model: ModelConfig, *, layout: Layout, device: torch.device
) -> ExpertRouting:
    """What ``config`` asks for. ``ConfigError`` if there is no writing to where loads are to be recorded."""
    if not is_asked(config):
        return ExpertRouting()
    moes = _moes(config, model)
    taps = [
        None
        if moe is None
        else Taps(
            layers=moe.layers,
            experts=moe.experts,
            chosen=moe.chosen,
            rows=rows,
            assigns=config.routing != "real",
            counts=config.record_expert_loads is not None,
            device=device,
        )
        for moe, rows in zip(moes, _most_rows(config, model), strict=True)
    ]
    target, draft = taps
    assert target is not None
    tail = 0 if model.last_kv_source is None else model.last_kv_source
    assigners = [
        None if tap is None or source is None else Assigner(tap, source, first_tail_layer=tail, device=device)
        for tap, source in zip(taps, _sources(config, moes), strict=True)
    ]
    recording = None
    if config.record_expert_loads is not None:
        header = Header(
            model=config.model.resolve().name,
            target=moes[0],
            draft=moes[1],
            layout="whole" if config.emulate is None else layout.name,
            routing=config.routing,
        )
        recording = _recording(
            config.record_expert_loads, header, parts=parts_of(layout, experts=model.n_routed_experts)
        )
    return ExpertRouting(Routing(target, draft), target=assigners[0], draft=assigners[1], recording=recording)


def _recording(path: Path, header: Header, *, parts: int) -> Recording:
    try:
        writer = LoadsWriter(path, header)
    except OSError as error:
        raise ConfigError("--record-expert-loads", [f"{path}: {error.strerror}"]) from error
    if writer.path != path:
        log.warning("there are expert loads already; new ones go beside them", path=str(writer.path))
    return Recording(writer, parts=parts)


def is_asked(config: EngineConfig) -> bool:
    """Somebody measures: other experts than the routers' are put in, or loads recorded."""
    return config.routing != "real" or config.record_expert_loads is not None


def bytes_of(config: EngineConfig, model: ModelConfig) -> int:
    """What it takes on the device: experts of all rows of all layers, what a step makes them of, and loads that are kept."""
    if config.routing == "real":
        return 0
    total = 0
    for moe, rows in zip(_moes(config, model), _most_rows(config, model), strict=True):
        if moe is not None:
            picks = rows * moe.chosen
            total += (
                moe.layers * picks * (8 + 8 + 4)
                + KEPT * moe.layers * moe.experts * 4
                + KEPT_PICKS * picks * 4
            )
    return total


def _most_rows(config: EngineConfig, model: ModelConfig) -> tuple[int, int]:
    """Of a step of the target, and of a pass of the draft."""
    block = model.dspark_block_size
    return max(config.max_num_batched_tokens, config.max_num_seqs * (1 + block)), config.max_num_seqs * block


def parts_of(layout: Layout, *, experts: int) -> int:
    """Parts that ``layout`` deals the experts out to; where they stay together, ``PARTS``, or the next fewer that shares them."""
    if layout.kind == DEP:
        return layout.size
    return next(parts for parts in range(min(PARTS, experts), 0, -1) if experts % parts == 0)


def _sources(config: EngineConfig, moes: tuple[Moe, Moe | None]) -> tuple[Source | None, Source | None]:
    target, draft = moes
    seed = config.seed
    if config.routing == "real":
        return None, None
    if config.expert_loads is None:
        return Uniform(target, seed=seed), None if draft is None else Uniform(draft, seed=seed + 1)
    steps = read(config.expert_loads).steps
    recorded = Recorded(
        target, lru_cache(KEPT)(lambda number: steps[number].target), period=len(steps), seed=seed
    )
    if draft is None:
        return recorded, None
    numbers = steps.drafted()

    @lru_cache(KEPT)
    def drafts(number: int) -> np.ndarray:
        found = steps[numbers[number]].draft
        assert found is not None
        return found

    return recorded, Recorded(draft, drafts, period=len(numbers), seed=seed + 1)


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
