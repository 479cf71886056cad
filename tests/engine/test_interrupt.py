"""Ctrl-C at any moment of ``Engine.steps``: the step ends, the engine is whole and goes on with others."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from flashstep.engine.engine import Engine
from tests.engine.test_engine import engine
from tests.scheduler.driving import request


@pytest.fixture(autouse=True)
def here() -> Iterator[None]:
    """SIGINT is ignored where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupted_in(move: str, one: Engine, monkeypatch: pytest.MonkeyPatch, *, times: int = 1) -> None:
    """SIGINT in the third call of ``move``."""
    call: Callable[..., Any] = getattr(one, move)
    calls = []

    def cut(*given: Any) -> Any:
        calls.append(move)
        if len(calls) == 3:
            for _ in range(times):
                press()
        return call(*given)

    monkeypatch.setattr(one, move, cut)


@pytest.mark.parametrize("move", ["plan", "launch", "commit"])
def test_the_engine_is_whole_behind_it(move: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    interrupted_in(move, one, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        one.generate([request(f"r{i}", (5, 6, 7), 20, seed=i, ignore_eos=True) for i in range(3)])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    one.check_integrity()
    assert not one.has_work
    again = [
        token
        for output in one.generate([request("r9", (5, 6, 7), 20, seed=1)])["r9"]
        for token in output.tokens
    ]
    assert again == [
        token
        for output in engine().generate([request("r", (5, 6, 7), 20, seed=1)])["r"]
        for token in output.tokens
    ]


def test_it_is_not_lost_where_somebody_leaves() -> None:
    one = engine()
    one.add(request("r", (5, 6, 7), 20, seed=1, ignore_eos=True))
    with pytest.raises(KeyboardInterrupt), closing(one.steps()) as steps:
        next(steps)
        press()
    one.abort(["r"])
    one.check_integrity()
    assert not one.has_work


def test_a_second_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    interrupted_in("commit", one, monkeypatch, times=2)
    with pytest.raises(SystemExit) as end:
        one.generate([request("r", (5, 6, 7), 20, seed=1, ignore_eos=True)])
    assert end.value.code == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_not_ours_is_left_alone() -> None:
    """Another thread cannot have a handler; a process in the background ignores Ctrl-C."""
    asked = [request("r", (5, 6, 7), 20, seed=1)]
    given: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: given.append(engine().generate(asked)))
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        one = engine()
        one.add(asked[0])
        for _ in one.steps():
            press()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert given[0]["r"][-1].finish_reason
