"""Runs of questions against scripted arms: what is kept, what is counted, what is asked again."""

import json
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from scipy.stats import binomtest

from flashstep.bench.ledger import Entry
from flashstep.bench.origin import origin
from flashstep.bench.quality.answers import AnswerFile, Reply, calls_of, judged
from flashstep.bench.quality.extract import Rule
from flashstep.bench.quality.prompts import Asked, Plan
from flashstep.bench.quality.questions import Question
from flashstep.bench.quality.run import Arm, Gone, Session, Take
from flashstep.bench.quality.score import Circumstances, wilson

QUESTIONS = tuple(Question(id=str(n), question=f"{n}?", answer=str(n), expected=str(n)) for n in range(10))
Answering = Callable[[Sequence[Question], int, Take], None]


def replies(
    of: Callable[[Question], Reply], *, stop_after: int = 99, how: type[BaseException] = Gone
) -> Answering:
    def ask(questions: Sequence[Question], run: int, take: Take) -> None:
        for count, question in enumerate(questions):
            if count == stop_after:
                raise how("connection refused")
            take(question, of(question))

    return ask


def right(question: Question) -> Reply:
    return Reply(text=f"it is {question.id}", finish_reason="stop", output_tokens=3)


def session(tmp_path: Path, ask: Answering, *, resume: bool = False, false: tuple[str, ...] = ()) -> Session:
    of = Circumstances(origin=origin(), settings={"n": 1}, subject={}, seed=5, job="j", raw="answers.jsonl")
    kept = AnswerFile(tmp_path / "answers.jsonl", {"settings": {"n": 1}}, resume=resume)
    return Session(
        Arm(ask, {}, lambda: false), kept, Asked(examples=(), questions=QUESTIONS), Rule.NUMBER, Plan(), of
    )


def run(of: Session, number: int = 0) -> tuple[list[Entry], list[object]]:
    entries: list[Entry] = []
    told: list[object] = []
    with of.kept:
        of.run(number, keep=entries.append, progress=told.append)
    return entries, told


def test_a_whole_run(tmp_path: Path) -> None:
    def some(question: Question) -> Reply:
        if question.id == "3":
            return Reply(text="I do not know", finish_reason="length", output_tokens=1)
        return right(question) if question.id != "4" else Reply(text="it is 5", finish_reason="stop")

    (entry,), told = run(session(tmp_path, replies(some)), 2)
    assert entry.metrics == {"accuracy": 0.8} and entry.complete and not entry.faults
    assert entry.samples.column("right") == {str(n): float(n not in (3, 4)) for n in range(10)}
    assert (entry.seed, entry.job, entry.kind, entry.raw) == (7, "j", "eval", "answers.jsonl")
    assert {name: entry.detail[name] for name in ("right", "unread", "cut", "asked")} == {
        "right": 8, "unread": 1, "cut": 1, "asked": 10,
    }  # fmt: skip
    assert told[-1] == (10, 8, 0)


def test_failures_are_told_and_count_neither_way(tmp_path: Path) -> None:
    def failing(question: Question) -> Reply:
        return right(question) if int(question.id) % 2 else Reply(text="half a", error="HTTP 503: full")

    (entry,), _ = run(session(tmp_path, replies(failing)))
    assert entry.metrics == {"accuracy": 1.0} and not entry.complete
    assert entry.faults == ("5 of 10 questions have no answer and are not counted", "5 x HTTP 503: full")
    assert len(entry.samples.keys) == 5
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert sum(line.get("right") is None for line in lines if "id" in line) == 5  # kept as well


def test_resuming_asks_only_what_is_missing(tmp_path: Path) -> None:
    (first,), _ = run(session(tmp_path, replies(right, stop_after=4)))
    assert not first.complete and first.faults[0] == "ended early: connection refused"
    asked: list[str] = []

    def noting(question: Question) -> Reply:
        asked.append(question.id)
        return right(question)

    (second,), told = run(session(tmp_path, replies(noting), resume=True))
    assert asked == ["4", "5", "6", "7", "8", "9"] and told[0] == (5, 5, 0)
    assert second.complete and second.metrics == {"accuracy": 1.0}
    asked.clear()
    assert run(session(tmp_path, replies(noting), resume=True)) == ([], []) and not asked
    assert len(run(session(tmp_path, replies(noting), resume=True), 1)[0]) == 1  # another run of the same


def test_ctrl_c_keeps_what_was_answered(tmp_path: Path) -> None:
    one = session(tmp_path, replies(right, stop_after=6, how=KeyboardInterrupt))
    entries: list[Entry] = []
    with one.kept, pytest.raises(KeyboardInterrupt):
        one.run(0, keep=entries.append, progress=lambda _: None)
    assert entries[0].faults[0] == "interrupted" and len(entries[0].samples.keys) == 6


def test_answers_of_a_torn_line_are_asked_again(tmp_path: Path) -> None:
    run(session(tmp_path, replies(right, stop_after=4)))
    file = tmp_path / "answers.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # the plan, two answers, a torn one
    (entry,), told = run(session(tmp_path, replies(right), resume=True))
    assert entry.complete and told[0] == (3, 3, 0)
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_a_file_of_another_plan_is_refused(tmp_path: Path) -> None:
    run(session(tmp_path, replies(right)))
    file = tmp_path / "answers.jsonl"
    with pytest.raises(ValueError, match="is there already: go on with it by --resume"):
        AnswerFile(file, {"settings": {"n": 1}}, resume=False)
    with pytest.raises(ValueError, match="cannot go on: --n: 1 then, 2 now"):
        AnswerFile(file, {"settings": {"n": 2}}, resume=True)
    file.write_text("{}\n")
    with pytest.raises(ValueError, match="holds no answers of eval"):
        AnswerFile(file, {}, resume=True)


def test_going_on_needs_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file of answers"):
        AnswerFile(tmp_path / "nothing.jsonl", {}, resume=True)


def test_a_full_disk_ends_the_file_and_not_the_run(tmp_path: Path) -> None:
    one = session(tmp_path, replies(right))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, before[1]))
        (entry,), _ = run(one)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert entry.metrics == {"accuracy": 1.0} and len(entry.samples.keys) == 10
    assert any("end early: File too large" in fault for fault in entry.faults)
    assert all(json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines())


def test_a_server_that_turns_synthetic_is_found_out(tmp_path: Path) -> None:
    (entry,), _ = run(session(tmp_path, replies(right), false=("synthetic acceptance",)))
    assert entry.falsified_by == ("synthetic acceptance",) and not entry.complete
    assert entry.faults == ("the answers are not the model's: synthetic acceptance",)


@pytest.mark.parametrize(("right", "total"), [(0, 10), (10, 10), (297, 300), (1196, 1319), (5, 8)])
def test_wilson_is_scipys(right: int, total: int) -> None:
    theirs = binomtest(right, total).proportion_ci(0.95, method="wilson")
    assert wilson(right, total) == pytest.approx((theirs.low, theirs.high), abs=1e-6)
    assert wilson(0, 0) == (0.0, 1.0)


def test_calls_come_apart() -> None:
    assert calls_of('calc{"e": "1 + {2}"}f{}') == (
        '{"name": "calc", "arguments": {"e": "1 + {2}"}}',
        '{"name": "f", "arguments": {}}',
    )
    assert calls_of("") == () and calls_of('calc{"e": ') == ('calc{"e": ',)
    question = Question(id="1", question="?", answer="", expected='{"arguments": {}, "name": "f"}')
    twice = Reply(calls=calls_of("f{}f{}"))
    assert judged(question, Reply(calls=calls_of("f{}")), Rule.CALL, run=0, seed=0).right
    assert not judged(question, twice, Rule.CALL, run=0, seed=0).right
