"""An engine in this process, as measurements drive it: built from its configuration, stepped as the serving loop steps it.

Each step is from one commit to the next, so it holds planning, sampling and whatever the device waits for; nothing traces it.
Knows no workload and no file.
"""

import signal
import statistics
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from types import FrameType
from typing import Any, TypeVar

import msgspec

from flashstep.config.engine import EngineConfig
from flashstep.config.model import ModelConfig
from flashstep.engine.engine import Engine
from flashstep.parallel.balance import balancedness, balancedness_by_window
from flashstep.parallel.loads import read
from flashstep.parallel.rank import Rank
from flashstep.runner.build import Built, build
from flashstep.runner.routing import parts_of

INTERRUPTED = "it was interrupted"
Item = TypeVar("Item")


class Offline:
    """``config`` built and ready; ``shapes`` stand for a checkpoint (dummy weights)."""

    def __init__(self, config: EngineConfig, *, shapes: ModelConfig | None = None) -> None:
        self.config = config
        self.built: Built = build(config, shapes=shapes)
        self.engine = Engine(self.built.runner, seed=config.seed)

    @property
    def subject(self) -> dict[str, Any]:
        """What is measured, as a ledger tells it."""
        changed = {
            field.name: value
            for field in msgspec.structs.fields(EngineConfig)
            if (value := getattr(self.config, field.name)) != field.default
        }
        return {
            "model": str(self.config.model),
            "layout": "whole" if self.config.emulate is None else self.built.layout.name,
            "device": str(self.built.pool.device),
            "engine": msgspec.to_builtins(changed, enc_hook=str),
        }

    @property
    def excluded(self) -> tuple[str, ...]:
        """What a step of the whole layout does and this one does not."""
        return Rank(self.built.layout).excluded

    def steps(self) -> "Generator[Timed]":
        """Run what was added. Whoever leaves early leaves nothing behind: what still ran is aborted."""
        before = time.perf_counter()
        try:
            with closing(between_steps(self.engine.steps())) as steps:
                for outputs in steps:
                    now = time.perf_counter()
                    tokens = tuple(len(output.tokens) for output in outputs if output.tokens)
                    yield Timed(us=1e6 * (now - before), tokens=tokens)
                    before = now
        finally:
            self.engine.abort(self.engine.unfinished)


def between_steps(steps: Generator[Item]) -> Generator[Item]:
    """``steps``, with Ctrl-C held back until the step that runs is over: half a step leaves an engine that nobody can use.

    Then KeyboardInterrupt is raised; a second Ctrl-C raises it at once.
    """
    asked = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            signal.default_int_handler(number, frame)
        asked = True

    here = threading.current_thread() is threading.main_thread()  # which alone hears of signals
    before = signal.signal(signal.SIGINT, hold) if here else None
    try:
        for item in steps:
            yield item
            if asked:
                raise KeyboardInterrupt
    finally:
        steps.close()
        if here:
            signal.signal(signal.SIGINT, before)


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """One step: microseconds since the commit before it, and the tokens that each request got which got any."""

    us: float
    tokens: tuple[int, ...]


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """How evenly ``parts`` shared the experts' load over the measured steps: the mean over steps, the least, and the window."""

    parts: int
    by_step: tuple[float, ...]
    window: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_step)


def balance(config: EngineConfig, built: Built, *, steps: slice) -> Balance | None:
    """What the recorded loads of ``steps`` come to (target layers); None where none are recorded."""
    path = config.record_expert_loads
    if path is None:
        return None
    parts = parts_of(built.layout, experts=built.config.n_routed_experts)
    targets = [step.target for step in read(path).steps[steps]]
    found = [balancedness(counts_LE, parts=parts) for counts_LE in targets]
    known = tuple(value for value in found if value is not None)
    if not known:
        return None
    (window,) = balancedness_by_window(targets, parts=parts, window=len(targets))
    return Balance(parts=parts, by_step=known, window=window)


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """What two arms must have in common of an engine: how its texts are made wrong, on purpose."""
    drafts = config.speculative
    rates = (
        None if drafts is None else (drafts.synthetic_acceptance_length or drafts.synthetic_acceptance_rates)
    )
    return {
        "routing": config.routing,
        "cache": "filled" if config.fill_cache else "computed",
        "synthetic_acceptance": msgspec.to_builtins(rates),
    }


def tokens_a_step(steps: Sequence[Timed]) -> float:
    """Tokens that a step brings to each request that it runs."""
    got = [count for step in steps for count in step.tokens]
    return statistics.fmean(got)
