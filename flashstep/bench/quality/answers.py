"""Answers, and the file that keeps every one of them as it comes: JSON lines, first the plan, then answers and ends of runs.

Takes what a model replied; gives what it said and whether that is right. A line is written at once, so that a run that was
interrupted goes on where it stopped; a torn last line (its writer was killed) is asked again. Knows no model and no HTTP.
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from flashstep.bench.quality.extract import Rule, extract, is_right
from flashstep.bench.quality.questions import Question
from flashstep.telemetry.lines import write_whole


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What came back. ``calls`` are JSON texts of name and arguments; ``error`` is a sentence where there is no whole answer."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[str, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One question of one run, answered (or not: ``error``, and ``right`` is None)."""

    run: int
    id: str
    expected: str
    extracted: str | None
    right: bool | None
    seed: int
    reply: Reply


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A run came to its end, ``complete`` or not, and was given out as ``entry`` (which is in a ledger, if one was asked for)."""

    ended_run: int
    complete: bool
    entry: str


def judged(question: Question, reply: Reply, rule: Rule, *, run: int, seed: int) -> Answer:
    """Read ``reply`` by ``rule``. Only the answer is read, never the reasoning before it."""
    found = None
    if not reply.error:
        said = reply.text if rule is not Rule.CALL else (reply.calls[0] if len(reply.calls) == 1 else "")
        found = extract(said, rule, question.expected)
    return Answer(
        run=run,
        id=question.id,
        expected=question.expected,
        extracted=found,
        right=None if reply.error else is_right(found, question.expected, rule),
        seed=seed,
        reply=reply,
    )


def calls_of(tool_text: str) -> tuple[str, ...]:
    """The calls in ``name{...}name{...}``, as JSON texts; what is no JSON stays as it is, and is then no call of any rule."""
    found = []
    rest = tool_text
    decoder = json.JSONDecoder()
    while rest:
        name, brace, _ = rest.partition("{")
        try:
            arguments, end = decoder.raw_decode(rest, len(name)) if brace else (None, 0)
        except json.JSONDecodeError:
            brace = ""
        if not brace:
            return (*found, rest)
        found.append(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))
        rest = rest[end:]
    return tuple(found)


class AnswerFile:
    """The file at ``path``. ``header`` is what the runs have in common; a file of another one is refused.

    ``resume`` False: the file must not be there yet; True: it must. Used with ``with``. A full disk ends the file and not the
    run: ``fault`` then says so, in a sentence. ``answers`` holds the newest line of each run and question that was answered;
    ``ended`` the runs that are complete and kept.
    """

    def __init__(self, path: Path, header: dict[str, Any], *, resume: bool) -> None:
        self.path = path
        self.answers: dict[tuple[int, str], Answer] = {}
        self.ended: dict[int, RunEnd] = {}
        plain = msgspec.json.decode(msgspec.json.encode(header))
        if path.exists() and not resume:
            raise ValueError(f"{path} is there already: go on with it by --resume, or give another --answers")
        if resume and not path.exists():
            raise ValueError(f"{path}: there is no such file of answers to go on with")
        self.fault = ""
        self._size = self._read(plain) if path.exists() else 0
        try:
            self._file = path.open("ab", buffering=0)
            self._file.truncate(self._size)
        except OSError as error:
            raise ValueError(f"the answers {path} cannot be written: {error.strerror}") from None
        if not self._size:
            self._write({"plan": plain})

    def _read(self, header: dict[str, Any]) -> int:
        """Take in what stands there; how many bytes of it are whole lines."""
        data = self.path.read_bytes()
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        if not lines:
            return 0
        try:
            found = msgspec.json.decode(lines[0])["plan"]
            kept = [msgspec.json.decode(line, type=dict[str, Any]) for line in lines[1:]]
            for line in kept:
                self._take(line)
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path} holds no answers of eval: {error}") from None
        if found != header:
            raise ValueError(
                f"{self.path} was begun otherwise, and cannot go on: {'; '.join(map(_in_words, _changes(found, header)))}"
            )
        return sum(map(len, lines))

    def _take(self, line: dict[str, Any]) -> None:
        if "ended_run" in line:
            end = msgspec.convert(line, RunEnd)
            if end.complete:
                self.ended[end.ended_run] = end
        else:
            answer = msgspec.convert(line, Answer)
            if not answer.reply.error:
                self.answers[answer.run, answer.id] = answer

    def keep(self, answer: Answer) -> None:
        """Write it now."""
        self._write(answer)
        if not answer.reply.error:
            self.answers[answer.run, answer.id] = answer

    def end(self, end: RunEnd) -> None:
        self._write(end)
        if end.complete:
            self.ended[end.ended_run] = end

    def missing(self, questions: Sequence[Question], *, run: int) -> list[Question]:
        """What has no answer yet."""
        return [question for question in questions if (run, question.id) not in self.answers]

    def _write(self, line: Any) -> None:
        if self.fault:
            return
        data = msgspec.json.encode(line) + b"\n"
        try:
            write_whole(self._file.fileno(), data)
            self._size += len(data)
        except OSError as error:
            self.fault = (
                f"the answers {self.path} end early: {error.strerror}; what was answered later is not in them"
            )
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


WORDS = {  # of a header, where the flag has another name
    "questions_sha256": "what stands in the questions",
    "questions": "the questions",
    "asked": "the number of questions (--limit)",
    "draws": "--draws",
    "runs": "the numbers of the runs (--round, --runs)",
    "server": "the server's version",
    "rejection_sample_method": "which drafts stand there",
    "model": "the model",
}


def _in_words(change: "Change") -> str:
    """A difference of two headers as whoever types the command names it."""
    name = change.name.removeprefix("settings.").removeprefix("subject.").removeprefix("engine.")
    flag = name if name.startswith("--") else f"--{name.replace('_', '-')}"
    told = ["not given" if value is None else msgspec.json.encode(value).decode() for value in change[1:]]
    return f"{WORDS.get(name, flag)}: {told[0]} then, {told[1]} now"


class Change(NamedTuple):
    """A value of one header that another one has otherwise; ``name`` is its path, with dots."""

    name: str
    before: Any
    now: Any


def _changes(before: Any, now: Any, name: str = "") -> list[Change]:
    """Where two headers differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            change
            for key in {**before, **now}
            for change in _changes(before.get(key), now.get(key), f"{name}.{key}" if name else key)
        ]
    return [] if before == now else [Change(name, before, now)]
