"""The processes that check grammars: they are bounded, ended and replaced, and what one grammar took another still has."""

import json
import multiprocessing
import threading
import time

import pytest
from llguidance import LLMatcher

from flashstep.request import Constraint
from flashstep.sampling import checking
from flashstep.sampling.checking import TOO_FAR, problem


def multiple_of(*numbers: int) -> Constraint:
    schema = {
        "type": "array",
        "prefixItems": [{"type": "integer", "multipleOf": number} for number in numbers],
    }
    return Constraint(grammar=LLMatcher.grammar_from_json_schema(json.dumps(schema)))


def pids() -> set[int]:
    """Of the processes that check for us."""
    return {
        process.pid for process in multiprocessing.active_children() if process.name == "flashstep-grammars"
    }


def test_verdicts_are_those_of_grammar() -> None:
    assert problem(Constraint(grammar='start: "a"')) is None
    assert problem(multiple_of(7)) is None
    wrong = problem(Constraint(grammar="start: b"))
    assert wrong is not None and "unknown name" in wrong


@pytest.mark.parametrize("numbers", [(99_999_989,), tuple(range(999_900, 999_983))])
def test_a_grammar_without_end_costs_a_process(
    monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...]
) -> None:
    """llguidance alone takes minutes and gigabytes for either."""
    monkeypatch.setattr(checking, "MOST_WAIT_S", 60.0)  # tests run beside others: its own limits decide
    problem(Constraint(grammar='start: "warm"'))
    before = pids()
    assert problem(multiple_of(*numbers)) == TOO_FAR
    began = time.monotonic()
    assert problem(multiple_of(*numbers)) == TOO_FAR
    assert time.monotonic() - began < 1, "nobody pays twice for one grammar"
    assert problem(Constraint(grammar=f'start: "behind {numbers[0]}"')) is None
    assert not before & pids() or checking.PROCESSES > 1, "what was ended is replaced"


def test_a_machine_without_time_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MOST_WAIT_S", 0.0)
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
    assert len(pids()) <= checking.PROCESSES
