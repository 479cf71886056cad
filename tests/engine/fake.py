"""Runners for engine tests, importable by name in a spawned process."""

import time
from pathlib import Path

from flashstep.config.cache import CacheConfig
from flashstep.config.engine import EngineConfig
from flashstep.config.scheduler import SchedulerConfig
from flashstep.step import StepResult
from tests.scheduler.fake_runner import FakeRunner

WINDOW = 8
POISON = 96  # a prompt that starts with this token makes a step fail
PAUSE = 95  # one that starts with this makes every step slow


class MoodyRunner(FakeRunner):
    """The checking fake runner, with a token that breaks it and one that makes it slow."""

    def run(self, plan, requests):
        if any(request.prompt[0] == POISON for request in requests):
            raise RuntimeError("the device is on fire")
        if any(s.request.prompt[0] == PAUSE for s in self.sequences.values()):
            time.sleep(0.02)
        return super().run(plan, requests)


class LateRunner(FakeRunner):
    """As a device does it: a step that was launched is not over, its result must be waited for. ``events`` tells the order."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.events: list[tuple[str, int]] = []

    def launch(self, plan, requests, compiled):
        self.events.append(("launch", plan.step))
        return Late(self.run(plan, requests), self.events)


class Late:
    """A step whose result nobody may look at before it was asked for."""

    over = False

    def when_over(self, call) -> None:
        self._call = call

    def end(self) -> None:
        """The runner has taken its result in."""
        if not self.over:
            self.over = True
            self._call()

    def __init__(self, step: StepResult, events: list[tuple[str, int]]) -> None:
        self._step, self._events = step, events
        self._call = lambda: None

    def result(self) -> StepResult:
        if not self.over:
            time.sleep(0.002)
            self._events.append(("result", self._step.step))
        return self._step


def build(config: EngineConfig) -> MoodyRunner:
    cache = CacheConfig(
        block_size=config.block_size,
        num_blocks=config.num_blocks_override or 256,
        num_window_blocks=256,
        enable_prefix_caching=config.enable_prefix_caching,
        hit_policy=config.hit_policy,
    )
    limits = SchedulerConfig(
        max_model_len=config.max_model_len or 256,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    return MoodyRunner(limits, cache, sliding_window=WINDOW)


def build_never(config: EngineConfig) -> MoodyRunner:
    raise ValueError("the checkpoint lacks layers.3.attn.wkv.scale")


def build_slowly(config: EngineConfig) -> MoodyRunner:
    time.sleep(60)
    return build(config)


def config(**options) -> EngineConfig:
    return EngineConfig(
        model=Path("fake"), **{"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, **options}
    )
