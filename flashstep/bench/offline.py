"""An engine in this process, as measurements drive it: built from its configuration, stepped as the serving loop steps it.

Each step is from one commit to the next, so it holds planning, sampling and whatever the device waits for; nothing traces it.
Knows no workload and no file.
"""

import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import msgspec

from flashstep.config.engine import EngineConfig
from flashstep.config.model import ModelConfig
from flashstep.engine.engine import Engine
from flashstep.parallel.balance import Evenness
from flashstep.parallel.loads import read
from flashstep.parallel.rank import Rank
from flashstep.runner.build import Built, build
from flashstep.runner.routing import parts_of

INTERRUPTED = "it was interrupted"


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
            with closing(self.engine.steps(ahead=runs_beside(self.built))) as steps:
                for outputs in steps:
                    now = time.perf_counter()
                    tokens = tuple(len(output.tokens) for output in outputs if output.tokens)
                    yield Timed(us=1e6 * (now - before), tokens=tokens)
                    before = now
        finally:
            self.engine.abort(self.engine.unfinished)


def runs_beside(built: Built) -> bool:
    """Whether steps run beside the host. Where it computes them, one launched ahead would run in the time of another."""
    return built.pool.device.type != "cpu"


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


def balance(built: Built, *, first: int, end: int | None = None) -> Balance | None:
    """What the recorded loads of steps ``first`` .. ``end`` come to (target layers); None where none are recorded."""
    path = built.runner.routing.recorded
    if path is None or not path.is_file():
        return None
    parts = parts_of(built.layout, experts=built.config.n_routed_experts)
    even = Evenness(parts=parts)
    for step in read(path).steps.between(first, end):
        even.add(step.target)
    return Balance(parts=parts, by_step=tuple(even.by_step), window=even.whole) if even.by_step else None


def settings_of(config: EngineConfig) -> dict[str, Any]:
    """What two arms must have in common of an engine: how its texts are made wrong, on purpose."""
    drafts = config.speculative
    rates = (
        None if drafts is None else (drafts.synthetic_acceptance_length or drafts.synthetic_acceptance_rates)
    )
    return {
        "routing": config.routing,
        "cache": "filled" if config.fill_cache else "computed",
        "fill_cache_std": config.fill_cache_std if config.fill_cache else None,
        "synthetic_acceptance": msgspec.to_builtins(rates),
    }


def tokens_a_step(steps: Sequence[Timed]) -> float:
    """Tokens that a step brings to each request that it runs."""
    got = [count for step in steps for count in step.tokens]
    return statistics.fmean(got)
