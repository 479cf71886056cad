"""Requests with constraints in the loop: they wait beside the steps, and whatever their grammar does, it costs nobody else."""

import threading
from types import SimpleNamespace

import pytest

from flashstep.ipc import messages
from flashstep.request import Constraint
from tests.engine import fake
from tests.engine.test_loop import ended, hear, serving
from tests.scheduler.driving import request
from tests.scheduler.fake_runner import expected

GOOD, BAD, BROKEN = (Constraint(grammar=text) for text in ("good", "bad", "broken"))


class Compiler(fake.MoodyRunner):
    """Compiles when it is let; "bad" grammars cannot be followed, "broken" ones break the compiler."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.let = threading.Event()
        self.taken: list[str] = []

    def compile(self, constraint):
        assert self.let.wait(30)
        if constraint is BROKEN or constraint.grammar == "broken":
            raise RuntimeError("the compiler is on fire")
        return SimpleNamespace(failure="a rule is missing" if constraint.grammar == "bad" else None)

    def launch(self, plan, requests, compiled):
        assert set(compiled) == {item.id for item in requests if item.params.constraint is not None}
        self.taken += compiled
        return super().launch(plan, requests, compiled)


@pytest.fixture
def rig():
    for server, runner, loop in serving(Compiler):
        yield server, runner, loop
        runner.let.set()


def outputs(heard):
    return [o for m in heard if isinstance(m, messages.Outputs) for o in m.outputs]


def test_others_go_on_while_a_grammar_is_compiled(rig):
    server, runner, _ = rig
    plain = request("plain", (5, 6, 7), 40, seed=1, ignore_eos=True)
    first = request("first", (5, 6, 8), 5, seed=1, ignore_eos=True, constraint=GOOD)
    server.send(messages.Submit((first,)))
    server.send(messages.Submit((plain,)))
    heard = hear(server, until=ended(1))
    assert {o.id for o in outputs(heard)} == {"plain"}
    assert [t for o in outputs(heard) for t in o.tokens] == expected(plain, vocab_size=97, max_model_len=256)[
        0
    ]
    waits = hear(
        server, until=lambda more: any(isinstance(m, messages.Stats) and m.running == 0 for m in more)
    )
    assert (waits[-1].deferred, waits[-1].waiting) == (1, 0)
    runner.let.set()
    heard = hear(server, until=ended(1))
    assert [t for o in outputs(heard) for t in o.tokens] == expected(first, vocab_size=97, max_model_len=256)[
        0
    ]
    assert runner.taken == ["first"]
    last = hear(
        server, until=lambda more: more and isinstance(more[-1], messages.Stats) and more[-1].deferred == 0
    )
    assert last[-1].waiting == 0


def test_what_cannot_be_compiled_is_rejected(rig):
    server, runner, _ = rig
    items = [
        request(c.grammar, (5, 6), 5, seed=1, ignore_eos=True, constraint=c) for c in (BAD, BROKEN, GOOD)
    ]
    server.send(messages.Submit(tuple(items)))
    runner.let.set()
    heard = hear(
        server, until=lambda more: ended(1)(more) and sum(isinstance(m, messages.Rejected) for m in more) == 2
    )
    told = {m.request_id: m.reason for m in heard if isinstance(m, messages.Rejected)}
    assert told == {
        "bad": "a rule is missing",
        "broken": "the grammar could not be compiled: the compiler is on fire",
    }
    assert {o.id for o in outputs(heard)} == {"good"}


def test_what_waits_can_be_aborted_and_its_id_is_in_use(rig):
    server, runner, _ = rig
    item = request("r", (5, 6), 5, seed=1, constraint=GOOD)
    server.send(messages.Submit((item, item)))
    server.send(messages.Abort(("r", "unknown")))
    heard = hear(server, until=ended(1))
    (rejected,) = [m for m in heard if isinstance(m, messages.Rejected)]
    assert "in use" in rejected.reason
    assert [(o.id, o.finish_reason) for o in outputs(heard)] == [("r", "abort")]
    runner.let.set()
    plain = request("plain", (5, 6, 7), 4, seed=1, ignore_eos=True)
    server.send(messages.Submit((plain,)))
    hear(server, until=ended(1))
    assert runner.taken == [], "an aborted request never reaches the runner"


def test_the_end_of_the_loop_aborts_what_waits(rig):
    server, _, loop = rig
    server.send(messages.Submit((request("r", (5, 6), 5, seed=1, constraint=GOOD),)))
    hear(server, until=lambda more: any(isinstance(m, messages.Stats) and m.deferred for m in more))
    loop.stop()
    assert outputs(hear(server, until=ended(1)))[0].finish_reason == "abort"
