"""The loop on the real wire and a real runner thread, in this process."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from flashstep.engine.engine import Engine
from flashstep.engine.loop import EngineLoop
from flashstep.ipc import messages
from flashstep.ipc.channel import Addresses, EngineEnd, ServerEnd
from tests.engine import fake
from tests.scheduler.driving import request
from tests.scheduler.fake_runner import expected


class Watched(fake.MoodyRunner):
    """Notes how many steps are planned while one runs."""

    def run(self, plan, requests):
        time.sleep(0.003)
        self.depths.append(self.engine.in_flight)
        return super().run(plan, requests)


class Settling(fake.LateRunner):
    """Takes in what is in flight when it launches, as the runner does before a step that needs the host; then it is slow."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.in_flight = []

    def launch(self, plan, requests, compiled):
        for step in self.in_flight:
            step.end()
        self.in_flight = [super().launch(plan, requests, compiled)]
        time.sleep(0.01)
        self.events.append(("launched", plan.step))
        return self.in_flight[0]


@pytest.fixture
def rig():
    yield from serving(Watched)


@pytest.fixture
def late_rig():
    yield from serving(fake.LateRunner)


@pytest.fixture
def settling_rig():
    yield from serving(Settling)


def serving(kind):
    made = fake.build(fake.config())
    runner = kind(made.facts.scheduler, made.facts.cache, sliding_window=fake.WINDOW)
    runner.depths = []
    addresses = Addresses.fresh()
    server, end = ServerEnd(addresses), EngineEnd(addresses)
    engine = runner.engine = Engine(runner, seed=0)
    with ThreadPoolExecutor(1) as runner_thread:
        loop = EngineLoop(engine, end, runner_thread=runner_thread, parent=None)
        thread = threading.Thread(target=loop.run)
        thread.start()
        yield server, runner, loop
        loop.stop()
        thread.join(10)
        assert not thread.is_alive()
    end.close()
    server.close()
    addresses.remove()


def hear(server, *, until, timeout_s: float = 10.0) -> list:
    heard = []
    end = time.monotonic() + timeout_s
    while not until(heard):
        assert time.monotonic() < end, f"heard only {heard[-5:]}"
        server.readable.poll(50)
        while (message := server.receive()) is not None:
            heard.append(message)
    return heard


def ended(count: int):
    def enough(heard) -> bool:
        outputs = [o for m in heard if isinstance(m, messages.Outputs) for o in m.outputs]
        return sum(o.finish_reason is not None for o in outputs) >= count

    return enough


def test_steps_overlap_and_each_sends_one_message(rig):
    server, runner, _ = rig
    hear(server, until=lambda heard: heard and isinstance(heard[0], messages.Ready))
    requests = [request(f"r{i}", (5, 6, i + 2), 40, seed=i, ignore_eos=True) for i in range(6)]
    server.send(messages.Submit(tuple(requests)))
    heard = hear(server, until=ended(6))
    outputs = [m for m in heard if isinstance(m, messages.Outputs)]
    for item in requests:
        tokens = [t for m in outputs for o in m.outputs if o.id == item.id for t in o.tokens]
        assert tokens == expected(item, vocab_size=97, max_model_len=256)[0]
    assert max(runner.depths) == 2
    assert runner.depths.count(2) > 0.8 * len(runner.depths), "the next step is planned while one runs"
    assert len(outputs) <= len(runner.depths), "one message a step"
    stats = hear(
        server, until=lambda more: more and isinstance(more[-1], messages.Stats) and more[-1].running == 0
    )
    assert stats[-1].generation_tokens == 240
    assert (stats[-1].cache_usage, stats[-1].waiting) == (0, 0)


def test_the_next_step_is_launched_before_a_result_is_waited_for(late_rig):
    """In steady state: launch N + 1, wait for N; and never the other way round but where nothing can be planned."""
    server, runner, _ = late_rig
    requests = [request(f"r{i}", (5, 6, i + 2), 40, seed=i, ignore_eos=True) for i in range(6)]
    server.send(messages.Submit(tuple(requests)))
    heard = hear(server, until=ended(6))
    outputs = [m for m in heard if isinstance(m, messages.Outputs)]
    for item in requests:
        tokens = [t for m in outputs for o in m.outputs if o.id == item.id for t in o.tokens]
        assert tokens == expected(item, vocab_size=97, max_model_len=256)[0]
    place = {event: number for number, event in enumerate(runner.events)}
    steps = range(max(step for _, step in runner.events))
    ahead = [place["launch", n + 1] < place["result", n] for n in steps]
    assert sum(ahead) > 0.9 * len(ahead)
    assert all(place["result", n] < place["result", n + 1] for n in steps), "results come in order"


def test_a_step_that_ends_while_the_next_is_launched_is_told_at_once(settling_rig):
    server, runner, _ = settling_rig
    commit, committed = runner.engine.commit, []

    def noted(result):
        committed.append((result.step, len(runner.events)))
        return commit(result)

    runner.engine.commit = noted
    server.send(messages.Submit((request("r", (5, 6, 7), 30, ignore_eos=True),)))
    hear(server, until=ended(1))
    ready = {step: place for place, (what, step) in enumerate(runner.events) if what == "launched"}
    early = [events <= ready[step + 1] for step, events in committed if step + 1 in ready]
    assert sum(early) > 0.8 * len(early)


def test_stats_come_at_most_every_tenth_of_a_second_and_stop_when_idle(rig):
    server, _, _ = rig
    server.send(messages.Submit((request("r", (5,), 120, ignore_eos=True),)))
    start = time.monotonic()
    heard = hear(server, until=ended(1))
    spent = time.monotonic() - start
    assert sum(isinstance(m, messages.Stats) for m in heard) <= spent / 0.1 + 2
    time.sleep(0.3)
    hear(server, until=lambda _: True)
    while server.receive() is not None:
        pass
    time.sleep(0.3)
    assert server.receive() is None, "nothing changes, nothing is said"


def test_what_the_door_refuses_is_rejected_alone(rig):
    server, _, _ = rig
    server.send(messages.Submit((request("bad", ()), request("ok", (5,), 3))))
    heard = hear(server, until=ended(1))
    (rejected,) = [m for m in heard if isinstance(m, messages.Rejected)]
    assert rejected.request_id == "bad"
    assert "empty" in rejected.reason


def test_stopping_ends_what_is_left(rig):
    server, _, loop = rig
    server.send(messages.Submit(tuple(request(f"r{i}", (5,), 200, ignore_eos=True) for i in range(20))))
    hear(server, until=lambda heard: any(isinstance(m, messages.Outputs) for m in heard))
    loop.stop()
    heard = hear(server, until=ended(20))
    outputs = [o for m in heard if isinstance(m, messages.Outputs) for o in m.outputs]
    assert sum(o.finish_reason == "abort" for o in outputs) == 20
