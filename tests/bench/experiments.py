"""Experiments with known truths: arms that ran in turns, the question that is asked of them, and its plan."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashstep.bench.arms import Arms, Question, arms_of
from flashstep.bench.experiment import Plan, Stated
from flashstep.bench.ledger import Entry
from flashstep.bench.measure import measure
from tests.bench.entries import at, run


def in_turns(a: Sequence[float], b: Sequence[float], control: Sequence[float] = (), **fields: Any) -> Arms:
    """Rounds in A B B A order (A B C C B A), a minute a run."""
    arms: dict[str, list[Entry]] = {"A": [], "B": [], "control": []}
    minute = 0
    for r, (one, other) in enumerate(zip(a, b, strict=True)):
        due = [("A", one), ("B", other)] + ([("control", control[r])] if len(control) else [])
        for label, value in due if r % 2 == 0 else due[::-1]:
            given = {"subject": {"build": "B" if label == "B" else "A"}} | fields
            arms[label].append(run(label, r, value, minute=minute, **given))
            minute += 1
    return arms_of(arms["A"], arms["B"], arms["control"])


def asked(metric: str = "output_tps", **fields: Any) -> Question:
    return Question(measure=measure(metric), **fields)


def plan(rounds: int, *, minute: int = -1, **fields: Any) -> Plan:
    given: dict[str, Any] = {
        "metric": "output_tps",
        "alpha": 0.05,
        "margin": "",
        "arms": {"A": "a", "B": "b"},
    }
    return Plan(date=at(minute).date, rounds=rounds, **(given | fields))


def stated(rounds: int, **fields: Any) -> Stated:
    return Stated(plan(rounds, **fields), "ab" * 32, Path("x.plan.json"))
