"""Drives a scheduler against the fake runner, with 0, 1 or 2 plans in flight, and gathers what each request was told."""

import random
from collections import deque
from dataclasses import dataclass, field

from flashstep.cache.blocks import BlockPool
from flashstep.config.cache import CacheConfig, HitPolicy
from flashstep.config.scheduler import SchedulerConfig
from flashstep.config.speculative import Speculation
from flashstep.request import FinishReason, Request, SamplingParams
from flashstep.scheduler.progress import Progress
from flashstep.scheduler.scheduler import Scheduler
from flashstep.step import MAX_IN_FLIGHT, StepPlan, StepResult
from tests.scheduler.fake_runner import EOS, FakeRunner, expected


def request(name: str, prompt, max_tokens: int = 8, **options) -> Request:
    outer = {
        key: options.pop(key)
        for key in ("arrival", "priority", "cache_salt", "transferred")
        if key in options
    }
    params = SamplingParams(max_tokens=max_tokens, **options)
    return Request(id=name, prompt=tuple(prompt), params=params, **outer)


@dataclass
class Told:
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    outputs: list[Progress] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Rig:
    """A scheduler, a fake runner, and the plans between them."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        num_window_blocks: int = 64,
        block_size: int = 4,
        window: int = 8,
        max_model_len: int = 128,
        hit_policy: HitPolicy = HitPolicy.EXACT,
        enable_prefix_caching: bool = True,
        order_seed: int | None = None,
        speculation: Speculation | None = None,
        **limits,
    ) -> None:
        self.config = SchedulerConfig(max_model_len=max_model_len, **limits)
        self.cache = CacheConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            num_window_blocks=num_window_blocks,
            hit_policy=hit_policy,
            enable_prefix_caching=enable_prefix_caching,
        )
        pools = None
        if order_seed is not None:
            chance = random.Random(order_seed)
            orders = [chance.sample(range(n), n) for n in (num_blocks, num_window_blocks)]
            pools = BlockPool(num_blocks, order=orders[0]), BlockPool(num_window_blocks, order=orders[1])
        self.time = 0.0
        self.scheduler = Scheduler(
            self.config,
            self.cache,
            sliding_window=window,
            eos_token_ids=(EOS,),
            speculation=speculation,
            pools=pools,
            clock=lambda: self.time,
        )
        self.runner = FakeRunner(self.config, self.cache, sliding_window=window, speculation=speculation)
        self.planned: deque[tuple[StepPlan, tuple[Request, ...]]] = deque()
        self.returned: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.told: dict[str, Told] = {}
        self.finish_order: list[str] = []
        self.requests: dict[str, Request] = {}

    # ---- moves ----

    def add(self, *requests: Request) -> None:
        for item in requests:
            self.scheduler.add(item)
            self.requests[item.id] = item
            self.told[item.id] = Told()

    def plan(self) -> StepPlan | None:
        if self.scheduler.in_flight == MAX_IN_FLIGHT:
            return None
        plan = self.scheduler.plan()
        if plan is not None:
            self.planned.append((plan, self.scheduler.first_admitted()))
            self.plans.append(plan)
        return plan

    def run(self) -> bool:
        if not self.planned:
            return False
        plan, requests = self.planned.popleft()
        self.returned.append(self.runner.run(plan, requests))
        return True

    def commit(self) -> bool:
        if not self.returned and not self.run():
            return False
        self.take(self.scheduler.commit(self.returned.popleft()))
        return True

    def abort(self, *ids: str) -> None:
        self.take(self.scheduler.abort(ids))

    def take(self, news: list[Progress]) -> None:
        for item in news:
            told = self.told[item.request_id]
            assert told.finish_reason is None, "nothing comes after the end"
            told.tokens += item.tokens
            told.prompt_logprobs += item.prompt_logprobs
            told.outputs.append(item)
            if item.finish_reason is not None:
                told.finish_reason = item.finish_reason
                self.finish_order.append(item.request_id)

    # ---- whole runs ----

    def step(self) -> bool:
        """Plan, run, commit, nothing overlapped."""
        return self.plan() is not None and self.commit()

    def finish(self, *, overlapped: bool = True, limit: int = 20_000) -> None:
        for _ in range(limit):
            if overlapped:
                while self.plan() is not None:
                    pass
            else:
                self.plan()
            if not self.commit():
                break
        else:
            raise AssertionError("it does not come to an end")
        assert not self.scheduler.has_work
        self.scheduler.check_integrity()

    def check_outputs(self) -> None:
        """Everybody got what a sequential run gives; aborted ones got a beginning of it."""
        for name, item in self.requests.items():
            told = self.told[name]
            tokens, reason = expected(item, vocab_size=97, max_model_len=self.config.max_model_len)
            if told.finish_reason is FinishReason.ABORT:
                assert told.tokens == tokens[: len(told.tokens)]
            else:
                assert told.tokens == tokens, name
                assert told.finish_reason is not None and told.finish_reason.value == reason
