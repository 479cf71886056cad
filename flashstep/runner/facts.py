"""What the engine must know of a runner, and nothing else (torch-free): its limits, and how steps are run on it.

``runner.build.build_runner(config: EngineConfig)`` gives a ``Runner``. The engine builds its scheduler from ``facts``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from flashstep.config.cache import CacheConfig
from flashstep.config.scheduler import SchedulerConfig
from flashstep.config.speculative import Speculation
from flashstep.request import Constraint, Request
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
    follows_grammars: bool = True  # False: nobody knows what the tokens spell
    falsifies: tuple[str, ...] = ()  # what makes every text wrong on purpose (``EngineConfig.falsifies``)
    fills_cache: bool = (
        False  # prompts come as if their records had been handed over; only then may any come from outside
    )

    @property
    def max_model_len(self) -> int:
        return self.scheduler.max_model_len


class Launched(Protocol):
    """A step that runs, or has run."""

    @property
    def over(self) -> bool:
        """Whether ``result`` has been worked out: then any thread may ask for it, and need not wait."""
        ...

    def when_over(self, call: Callable[[], None]) -> None:
        """Call ``call`` when it is over, in the runner's thread, from which this must be called too; at once if it is."""
        ...

    def result(self) -> StepResult:
        """What came of it, when it is over; may be asked again. From the thread that launched it."""
        ...


class Compiled(Protocol):
    """A constraint that a request can follow from its first token on."""

    @property
    def failure(self) -> str | None:
        """Why it cannot be followed, in words for the user; None if it can."""
        ...


class Runner(Protocol):
    """Runs steps in the order given, always from one and the same thread; compiles constraints in any, beside the steps.

    ``launch`` may return before the step is over; the next step may be launched before its result is asked for.
    ``requests`` are those that ``plan`` admits for the first time, ``compiled`` the constraints of those that have one, by id;
    each is used for one request. Order of effects inside a plan: ``finished`` ids are
    forgotten, ``released`` slots are dropped, ``admitted`` ones take theirs, then all spans run as one forward. A plan is
    only ever made with at least one span.
    """

    @property
    def facts(self) -> RunnerFacts: ...

    @property
    def balancedness(self) -> float | None:
        """Of the experts' loads in the newest steps; None where they are not recorded. From any thread."""
        ...

    def compile(self, constraint: Constraint) -> Compiled: ...

    def launch(
        self, plan: StepPlan, requests: Sequence[Request], compiled: Mapping[str, Compiled]
    ) -> Launched: ...
