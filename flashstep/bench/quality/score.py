"""From the answers of a run to its score, and to an entry of the ledger.

Takes ``Answer``s; gives counts, a Wilson interval, and an ``Entry`` whose samples are questions by id. A question without an
answer counts as neither right nor wrong: it is told, and the run is incomplete. Knows no model and no HTTP.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from flashstep.bench.ledger import Entry, Samples
from flashstep.bench.origin import Origin
from flashstep.bench.quality.answers import Answer

Z95 = 1.959964
MOST_FAULTS = 5


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one run. ``unread``: answers in which the rule found nothing (wrong ones); ``cut``: those that met max_tokens."""

    right: int
    answered: int
    asked: int
    unread: int
    cut: int
    output_tokens: int

    @property
    def accuracy(self) -> float | None:
        return self.right / self.answered if self.answered else None


def scored(answers: Sequence[Answer], *, asked: int) -> Score:
    """``answers`` are those of one run; ``asked`` how many there should be."""
    given = [answer for answer in answers if answer.right is not None]
    return Score(
        right=sum(answer.right is True for answer in given),
        answered=len(given),
        asked=asked,
        unread=sum(answer.extracted is None for answer in given),
        cut=sum(answer.reply.finish_reason == "length" for answer in given),
        output_tokens=sum(answer.reply.output_tokens or 0 for answer in given),
    )


def wilson(right: int, total: int) -> tuple[float, float]:
    """The 95% interval of a share, without continuity correction; 0 to 1 where nothing was counted."""
    if total == 0:
        return 0.0, 1.0
    p, square = right / total, Z95 * Z95
    middle = (p + square / (2 * total)) / (1 + square / total)
    half = Z95 * math.sqrt(p * (1 - p) / total + square / (4 * total * total)) / (1 + square / total)
    return max(0.0, middle - half), min(1.0, middle + half)


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What all runs of one command have in common, as an entry has it."""

    origin: Origin
    settings: dict[str, Any]
    subject: dict[str, Any]
    seed: int
    job: str | None
    raw: str


def entry_of(
    answers: Sequence[Answer],
    failed: Sequence[Answer],
    of: Circumstances,
    *,
    run: int,
    asked: int,
    ended: str = "",
) -> Entry:
    """One run. ``failed`` are those of its questions that have no answer after all; ``ended`` says why it stopped early."""
    score = scored(answers, asked=asked)
    faults = [ended] if ended else []
    if score.answered < asked:
        faults.append(f"{asked - score.answered} of {asked} questions have no answer and are not counted")
    reasons = Counter(answer.reply.error for answer in failed)
    faults += [f"{count} x {reason}" for reason, count in reasons.most_common(MOST_FAULTS)]
    low, high = wilson(score.right, score.answered)
    rows = sorted(answers, key=lambda answer: answer.id)
    return Entry(
        kind="eval",
        origin=of.origin,
        settings=of.settings,
        subject=of.subject,
        samples=Samples(
            unit="question",
            keys=tuple(answer.id for answer in rows),
            columns={
                "right": tuple(None if answer.right is None else float(answer.right) for answer in rows),
                "output_tokens": tuple(answer.reply.output_tokens for answer in rows),
            },
        ),
        metrics={} if score.accuracy is None else {"accuracy": score.accuracy},
        seed=of.seed + run,
        job=of.job,
        detail=msgspec.structs.asdict(score) | {"low": low, "high": high, "run": run},
        faults=tuple(faults),
        complete=score.answered == asked,
        raw=of.raw,
    )
