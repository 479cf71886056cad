"""Whether what is claimed was decided before the runs: the one place where a plan is matched with rows.

Rows that carry a plan's hash are exactly what that plan says, or nothing is claimed of them. Rows that carry none are not
planned, and the claim says so.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from flashstep.bench.arms import Arms, Question
from flashstep.bench.experiment import Stated, is_of, margin
from flashstep.bench.ledger import Entry
from flashstep.bench.measure import measure
from flashstep.bench.verdicts.verdict import Verdict, distinct, some

UNPLANNED, UNLIKE = "plan", "as planned"
AGAIN = "compare the plan's own arms with each other; if the ledger is not as planned, begin another one"


def is_attested(verdicts: Iterable[Verdict], question: Question) -> bool:
    """Whether the rows are exactly what a plan says that was written before them."""
    return question.stated is not None and not any(item.rule in (UNPLANNED, UNLIKE) for item in verdicts)


def of_plan(arms: Arms, question: Question) -> Iterator[Verdict]:
    """Verdicts of the rules ``UNPLANNED`` (no row carries a plan) and ``UNLIKE`` (they do, and are not what it says)."""
    carried = distinct(e.plan for e in (*arms.all, *arms.replaced))
    stated = question.stated
    if carried == [None]:
        why = "no plan was written before the runs, so that metric and number of runs may have been chosen after them"
        if stated is not None:
            why = f"the runs do not carry the hash of {stated.file}, and were not planned by it"
        remedy = "let flashstep bench compare run the arms"
        yield Verdict(rule=UNPLANNED, stops="nothing", why=why, remedy=remedy)
        if question.margin is not None:
            yield Verdict(
                rule="margin beforehand",
                stops="non-inferiority",
                why="the margin was not stated before the runs (E28)",
                remedy="state it with --margin when the runs are planned",
            )
    elif stated is None or carried != [stated.digest]:
        names = some(["none" if name is None else name[:12] for name in carried])
        here = "there is no such plan" if stated is None else f"{stated.file} has {stated.digest[:12]}"
        yield Verdict(
            rule=UNLIKE,
            stops="claim",
            why=f"the runs carry the hash of a plan ({names}), and {here}: they are judged by their plan, or not at all",
            remedy="give the plan that was written before them with --plan",
        )
    else:
        for why in _unlike(arms, question, stated):
            yield Verdict(rule=UNLIKE, stops="claim", why=why, remedy=AGAIN)


def _unlike(arms: Arms, question: Question, stated: Stated) -> Iterator[str]:
    """Everything in which rows or question are not what the plan says, in sentences."""
    plan = stated.plan
    for role in dict.fromkeys([*plan.arms, *arms.named]):
        labels = distinct(e.label for e in arms.named.get(role, ()))
        if labels != ([role] if role in plan.arms else []):
            planned = f"the plan has an arm {role}" if role in plan.arms else f"the plan has no arm {role}"
            yield f"{planned}, and in its place stands {some(labels) or 'nothing'}"
    for label, runs in arms.named.items():
        other = distinct(
            e.origin.command
            for e in runs
            if e.label in plan.arms and not is_of(plan.arms[e.label], e.origin.command)
        )
        if other:
            yield f"arm {label} was planned as {plan.arms.get(label)!r}, and its runs say {some(other)!r}"
        yield from _wrong_rounds(label, runs, plan.rounds)
    early = [e.id for e in arms.all if e.origin.date < plan.date]
    if early:
        yield f"{len(early)} run(s) are older than the plan of {plan.date} ({some(early)})"
    dates = {(e.round, e.label): e.origin.date for e in arms.all}
    late = [
        f"round {after[0]}, arm {after[1]}"
        for before, after in pairwise(place for place in plan.schedule if place in dates)
        if dates[before] > dates[after]
    ]
    if late:
        yield f"runs are not in the plan's order ({some(late)} ran before what comes before), as if some had been run anew"
    asked = (
        measure(plan.metric),
        plan.alpha,
        margin(plan.margin, is_accuracy=measure(plan.metric).is_accuracy) if plan.margin else None,
    )
    if asked != (question.measure, question.alpha, question.margin):
        yield f"the plan asks for {plan.metric} at the level {plan.alpha:g} with the margin {plan.margin or 'none'}"


def _wrong_rounds(label: str, runs: tuple[Entry, ...], rounds: int) -> Iterator[str]:
    """There must be one complete run of each round."""
    counts = Counter(e.round for e in runs if e.complete)
    twice = [f"round {r} has {count}" for r, count in sorted(counts.items()) if count > 1]
    if twice:
        yield f"arm {label} was to run once in each round, and {some(twice)} complete runs"
    if set(counts) != set(range(rounds)):
        yield (
            f"{rounds} rounds were planned, and arm {label} has {len(counts)}: a claim that may be made as soon as it looks good "
            "is made too often"
        )
