"""What the engine must know of a runner, and nothing else (torch-free): its limits, and the two things it can do.

``runner.build.build_runner(config: EngineConfig)`` gives a ``Runner``. The engine builds its scheduler from ``facts``.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from flashstep.config.cache import CacheConfig
from flashstep.config.scheduler import SchedulerConfig
from flashstep.config.speculative import Speculation
from flashstep.request import Request
from flashstep.step import StepPlan, StepResult


class RunnerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed when the runner is built. ``scheduler.max_model_len`` is the limit after the memory plan has had its say."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    sliding_window: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    token_map_fingerprint: str
    speculation: Speculation | None = None
    follows_grammars: bool = (
        True  # False: the checkpoint has no tokenizer, so nobody knows what its tokens spell
    )

    @property
    def max_model_len(self) -> int:
        return self.scheduler.max_model_len


class Runner(Protocol):
    """Runs steps in the order given, always from one and the same thread.

    ``requests`` are those that ``plan`` admits for the first time. Order of effects inside a plan: ``finished`` ids are
    forgotten, ``released`` slots are dropped, ``admitted`` ones take theirs, then all spans run as one forward. A plan is
    only ever made with at least one span.
    """

    @property
    def facts(self) -> RunnerFacts: ...

    def run(self, plan: StepPlan, requests: Sequence[Request]) -> StepResult: ...
