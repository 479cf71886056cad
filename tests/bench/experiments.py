"""Experiments with known truths: arms that ran in turns, the question that is asked of them, and its plan."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashstep.bench.arms import Arms, Question, arms_of
from flashstep.bench.experiment import Plan, Stated
from flashstep.bench.ledger import Entry
from flashstep.bench.measure import measure
from flashstep.bench.stats.design import balanced, order
from tests.bench.entries import MACHINE, at, run


def in_turns(a: Sequence[float], b: Sequence[float], control: Sequence[float] = (), **fields: Any) -> Arms:
    """Rounds in the plan's order, a minute a run."""
    arms: dict[str, list[Entry]] = {"A": [], "B": [], "control": []}
    minute = 0
    values = {"A": a, "B": b} | ({"control": control} if len(control) else {})
    whole = balanced(len(a), arms=len(values))
    for r, label in order(list(values), rounds=whole):
        if r < len(a):
            given = {"subject": {"build": "B" if label == "B" else "A"}} | fields
            arms[label].append(run(label, r, values[label][r], minute=minute, **given))
            minute += 1
    return arms_of(arms["A"], arms["B"], arms["control"])


def asked(metric: str = "output_tps", **fields: Any) -> Question:
    return Question(measure=measure(metric), **fields)


def plan(rounds: int, *, minute: int = -1, arms: int = 2, **fields: Any) -> Plan:
    given: dict[str, Any] = {
        "metric": "output_tps",
        "alpha": 0.05,
        "margin": "",
        "arms": dict.fromkeys(["A", "B", "control"][:arms], MACHINE.command),
    }
    return Plan(date=at(minute).date, rounds=rounds, **(given | fields))


def stated(rounds: int, **fields: Any) -> Stated:
    return Stated(plan(rounds, **fields), "ab" * 32, Path("x.plan.json"))
