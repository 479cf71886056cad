"""The processes that check grammars: each try is bounded, what one took another still has, none waits for long ones."""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from llguidance import LLMatcher

from flashstep.request import Constraint
from flashstep.sampling import checking
from flashstep.sampling.checking import TOO_FAR, problem
from flashstep.sampling.grammar import MAX_GRAMMAR_CHARS


def multiple_of(*numbers: int) -> Constraint:
    schema = {
        "type": "array",
        "prefixItems": [{"type": "integer", "multipleOf": number} for number in numbers],
    }
    return Constraint(grammar=LLMatcher.grammar_from_json_schema(json.dumps(schema)))


def comes_true(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while time.monotonic() < end and not condition():
        time.sleep(0.01)
    return condition()


def pids() -> set[int]:
    """Of the processes that check for us."""
    return {process.pid for process in multiprocessing.active_children() if process.name == checking.NAME}


def test_verdicts_are_those_of_grammar() -> None:
    assert problem(Constraint(grammar='start: "a"')) is None
    assert problem(multiple_of(7)) is None
    wrong = problem(Constraint(grammar="start: b"))
    assert wrong is not None and "unknown name" in wrong


@pytest.mark.parametrize("numbers", [(99_999_989,), tuple(range(999_900, 999_983))])
def test_a_grammar_without_end_costs_a_try(monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...]) -> None:
    """llguidance alone takes minutes and gigabytes for either."""
    monkeypatch.setattr(checking, "MOST_WAIT_S", 60.0)  # tests run beside others: its own limits decide
    problem(Constraint(grammar='start: "warm"'))
    assert problem(multiple_of(*numbers)) == TOO_FAR
    again = checking.Wait(over=True).run(lambda: problem(multiple_of(*numbers)))
    assert again == TOO_FAR, "nobody pays twice for one grammar"
    assert problem(Constraint(grammar=f'start: "behind {numbers[0]}"')) is None


def test_a_machine_without_time_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MOST_WAIT_S", 0.001)
    late = multiple_of(99_999_787)
    with pytest.raises(checking.Busy, match="try again"):
        problem(late)
    monkeypatch.undo()
    assert problem(Constraint(grammar='start: "after a busy time"')) is None


def test_many_wait_their_turn() -> None:
    found: list[str | None] = []
    threads = [
        threading.Thread(
            target=lambda n=n: found.append(problem(Constraint(grammar=f'start: "t{n}" | {n % 2 * "x"}')))
        )
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and sum(item is None for item in found) == 4
    assert len(pids()) <= checking.PROCESSES + 1


def hostile(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> tuple[list[checking.Wait], dict[int, object]]:
    """As many threads wait, each with a grammar that is too long; what each has come to so far."""
    monkeypatch.setattr(checking, "MOST_WAIT_S", 60.0)
    problem(Constraint(grammar='start: "started"'))
    waits, found = [checking.Wait() for _ in numbers], {}

    def look(wait: checking.Wait, number: int) -> None:
        try:
            found[number] = wait.run(lambda: problem(multiple_of(number)))
        except checking.Busy:
            found[number] = checking.Busy

    for wait, number in zip(waits, numbers, strict=True):
        threading.Thread(target=look, args=(wait, number)).start()
    return waits, found


def test_who_takes_long_waits_behind_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = range(99_990_009, 99_990_069, 10)
    waits, found = hostile(monkeypatch, *numbers)
    assert problem(multiple_of(11)) is None, "a new one"
    assert TOO_FAR not in found.values(), "none of the six had its second try before"
    assert problem(multiple_of(7)) is None
    for wait in waits[1:]:
        wait.end()
    assert comes_true(lambda: len(found) == len(numbers))
    assert checking.Busy in found.values(), "who gives up is not looked at"


def test_the_line_for_long_tries_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking._long, "_most_waiting", 1)
    waits, found = hostile(monkeypatch, *range(99_980_009, 99_980_049, 10))
    assert comes_true(lambda: list(found.values()).count(checking.Busy) == 2)
    for wait in waits:
        wait.end()
    assert comes_true(lambda: len(found) == len(waits))


def test_what_is_over_asks_nobody() -> None:
    known, new = Constraint(grammar='start: "known"'), Constraint(grammar='start: "new"')
    problem(known)
    over = checking.Wait(over=True)
    assert over.run(lambda: problem(known)) is None
    with pytest.raises(checking.Busy):
        over.run(lambda: problem(new))
    assert problem(new) is None, "to be busy is no verdict"


def test_a_try_ends_with_its_checker(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what somebody ended is replaced."""
    monkeypatch.setattr(checking, "MOST_WAIT_S", 60.0)
    problem(Constraint(grammar='start: "up"'))
    before = pids()
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(_verdict(multiple_of(99_970_009))))
    waiting.start()
    assert comes_true(lambda: any(children(pid) for pid in pids()))
    tries = [child for pid in pids() for child in children(pid)]
    for pid in pids():
        os.kill(pid, signal.SIGKILL)
    waiting.join(20)
    assert found == [TOO_FAR]
    assert comes_true(lambda: not any(Path(f"/proc/{pid}").exists() for pid in tries))
    assert pids() and not pids() & before


def test_the_end_of_a_server_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, found = hostile(monkeypatch, *range(99_950_009, 99_950_039, 10))
    assert comes_true(lambda: any(children(pid) for pid in pids()))
    before = pids()
    for wait in waits:
        wait.end()
    checking.end()
    assert comes_true(lambda: len(found) == len(waits) and not pids())
    assert before and set(found.values()) <= {checking.Busy, TOO_FAR}
    assert problem(Constraint(grammar='start: "in the same process"')) is None


def test_a_checker_that_is_ended_while_it_is_idle_costs_nobody_an_answer() -> None:
    problem(Constraint(grammar='start: "idle"'))
    for pid in (killed := pids()):
        os.kill(pid, signal.SIGKILL)
    assert comes_true(lambda: not pids() & killed)
    assert problem(Constraint(grammar='start: "after the idle one"')) is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGALRM])
def test_a_try_that_the_machine_ends_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """As the kernel does that is out of memory, and the try's own clock on a machine that is busy with other things."""
    monkeypatch.setattr(checking, "MOST_WAIT_S", 60.0)
    slow = multiple_of(99_960_009 + 10 * number)
    problem(Constraint(grammar='start: "up"'))
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(_verdict(slow)))
    waiting.start()
    assert comes_true(lambda: _end_tries(number) or bool(found))
    waiting.join(20)
    assert found == [checking.Busy]
    with pytest.raises(checking.Busy):
        checking.Wait(over=True).run(lambda: problem(slow))


def test_what_is_too_long_is_not_kept() -> None:
    long = Constraint(grammar="x" * (MAX_GRAMMAR_CHARS + 1))
    before = len(checking._verdicts)
    wrong = checking.Wait(over=True).run(lambda: problem(long))
    assert wrong is not None and "characters long" in wrong
    assert len(checking._verdicts) == before and long not in checking._verdicts


def _end_tries(number: signal.Signals) -> bool:
    """Whether there was one to end."""
    tries = [child for pid in pids() for child in children(pid)]
    for child in tries:
        try:
            os.kill(child, number)
        except ProcessLookupError:
            return False
    return bool(tries)


def _verdict(constraint: Constraint) -> object:
    try:
        return problem(constraint)
    except checking.Busy:
        return checking.Busy


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
