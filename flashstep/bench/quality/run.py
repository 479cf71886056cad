"""One run of questions: ask what has no answer yet, keep each answer as it comes, and make an entry of it however it ends.

Takes an ``Arm`` (something that answers) and an ``AnswerFile``; gives a ``Score`` and an ``Entry``. Knows no HTTP and no engine.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from flashstep.bench.ledger import Entry
from flashstep.bench.quality.answers import Answer, AnswerFile, Reply, RunEnd, judged
from flashstep.bench.quality.extract import Rule
from flashstep.bench.quality.prompts import Asked, Plan, request_seed
from flashstep.bench.quality.questions import Question
from flashstep.bench.quality.score import Circumstances, Score, entry_of, scored

Take = Callable[[Question, Reply], None]


class Gone(Exception):
    """What answered is not there any more; the sentence says what the last question met."""


class Arm(NamedTuple):
    """What answers: ``ask(questions, run, take)`` hands each reply to ``take``; ``subject`` is what an entry says of it.

    ``false`` says why its answers cannot be the model's (() if they can); asked again behind each run, for a server may be
    another one by then.
    """

    ask: Callable[[Sequence[Question], int, Take], None]
    subject: dict[str, Any]
    false: Callable[[], tuple[str, ...]]


class Counted(NamedTuple):
    """How far a run is."""

    done: int
    right: int
    failed: int


class Session(NamedTuple):
    """What all runs of one command share."""

    arm: Arm
    kept: AnswerFile
    asked: Asked
    rule: Rule
    plan: Plan
    of: Circumstances

    def run(
        self, number: int, *, keep: Callable[[Entry], object], progress: Callable[[Counted], object]
    ) -> tuple[Score, Entry | None]:
        """Run ``number``, or what is missing of it; no entry if it was complete and kept before.

        ``keep`` takes the entry, ``progress`` is told after each answer. KeyboardInterrupt comes out behind everything that was
        answered is kept.
        """
        questions = self.asked.questions
        missing = self.kept.missing(questions, run=number)
        if not missing and number in self.kept.ended:
            return scored(self._answers(number), asked=len(questions)), None
        failed: list[Answer] = []
        ended = "interrupted"
        try:
            self.arm.ask(missing, number, self._taker(number, failed, progress))
            ended = ""
        except Gone as gone:
            ended = f"ended early: {gone}"
        finally:
            entry = self._entry(number, failed, ended)
            keep(entry)
            self.kept.end(RunEnd(ended_run=number, complete=entry.complete, entry=entry.id))
        return scored(self._answers(number), asked=len(questions)), entry

    def _taker(self, number: int, failed: list[Answer], progress: Callable[[Counted], object]) -> Take:
        before = self._answers(number)
        right, done = sum(answer.right is True for answer in before), len(before)

        def take(question: Question, reply: Reply) -> None:
            nonlocal right, done
            seed = request_seed(self.plan, number, question.id)
            answer = judged(question, reply, self.rule, run=number, seed=seed)
            self.kept.keep(answer)
            if answer.right is None:
                failed.append(answer)
            right += answer.right is True
            done += 1
            progress(Counted(done, right, len(failed)))

        return take

    def _answers(self, number: int) -> list[Answer]:
        return [answer for (run, _), answer in self.kept.answers.items() if run == number]

    def _entry(self, number: int, failed: Sequence[Answer], ended: str) -> Entry:
        made = entry_of(
            self._answers(number), failed, self.of, run=number, asked=len(self.asked.questions), ended=ended
        )
        if self.kept.fault:
            made = msgspec.structs.replace(made, faults=(*made.faults, self.kept.fault))
        if false := self.arm.false():
            faults = (*made.faults, f"the answers are not the model's: {' and '.join(false)}")
            return msgspec.structs.replace(made, falsified_by=false, complete=False, faults=faults)
        return made
