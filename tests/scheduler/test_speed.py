"""How the cost of a plan grows. Ratios only: absolute times belong to a machine (they are printed)."""

import statistics
import time

import pytest

from flashstep.config.cache import CacheConfig
from flashstep.config.scheduler import SchedulerConfig
from flashstep.scheduler.scheduler import Scheduler
from flashstep.step import SpanResult, StepPlan, StepResult
from tests.scheduler.driving import request


class Clocked:
    """A scheduler with ``count`` decoding requests and one step always in flight; the runner answers at once."""

    def __init__(self, count: int, *, prompt: int = 200) -> None:
        config = SchedulerConfig(max_model_len=8192, max_num_seqs=count, max_num_batched_tokens=8192)
        cache = CacheConfig(num_blocks=count * 32 + 256, num_window_blocks=count * 16 + 512)
        self.scheduler = Scheduler(config, cache, sliding_window=128, eos_token_ids=(1,))
        self.holders: dict[int, str] = {}
        for number in range(count):
            self.scheduler.add(
                request(f"r{number}", range(number + 2, number + 2 + prompt), 4000, ignore_eos=True)
            )
        while True:
            plan = self.scheduler.plan()
            self.scheduler.commit(self.answer(plan))
            if len(plan.spans) == count and plan.rows == count:
                break
        self.last = self.scheduler.plan()

    def answer(self, plan: StepPlan) -> StepResult:
        self.holders |= {a.slot: a.request_id for a in plan.admitted}
        spans = [
            SpanResult(slot=s.slot, request_id=self.holders[s.slot], tokens=(5,) if s.sample else ())
            for s in plan.spans
        ]
        return StepResult(step=plan.step, spans=tuple(spans))

    def step(self) -> tuple[float, float]:
        """CPU seconds of a plan and of a commit."""
        start = time.thread_time()
        plan = self.scheduler.plan()
        planned = time.thread_time() - start
        result = self.answer(self.last)
        self.last = plan
        start = time.thread_time()
        self.scheduler.commit(result)
        return planned, time.thread_time() - start


@pytest.mark.parametrize("waiting", [0, 2000])
def test_a_step_is_linear_in_running_requests_and_does_not_see_the_queue(waiting):
    counts = (64, 256, 1024)
    rigs = [Clocked(count) for count in counts]
    for rig in rigs:
        for number in range(waiting):
            rig.scheduler.add(request(f"w{number}", (5, 6, 7)))
    samples = {count: [] for count in counts}
    for _ in range(60):  # interleaved: what disturbs the machine disturbs all three
        for count, rig in zip(counts, rigs, strict=True):
            samples[count].append(rig.step())
    plans = [statistics.median(plan for plan, _ in samples[count]) for count in counts]
    commits = [statistics.median(commit for _, commit in samples[count]) for count in counts]
    for count, plan, commit in zip(counts, plans, commits, strict=True):
        print(f"{count} running, {waiting} waiting: plan {plan * 1e3:.3f} ms, commit {commit * 1e3:.3f} ms")
    for times in (plans, commits):
        assert times[2] / times[0] < 16 * 2
        assert times[2] / times[1] < 4 * 2


def test_adding_and_aborting_cost_no_scan_of_the_running():
    rig = Clocked(64)
    plans = [rig.step()[0] for _ in range(20)]
    start = time.thread_time()
    for number in range(500):
        rig.scheduler.add(request(f"w{number}", (5, 6, 7)))
    rig.scheduler.abort([f"w{number}" for number in range(500)])
    each = (time.thread_time() - start) / 500
    assert each < statistics.median(plans), "one request costs less than a plan for 64"
    rig.scheduler.check_integrity()
