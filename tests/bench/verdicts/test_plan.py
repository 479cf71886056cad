"""A plan and its rows: everything in which they differ stops the claim; rows without a plan are claimed as not planned."""

from collections.abc import Callable

import msgspec
import pytest

from flashstep.bench.arms import Arms, arms_of
from flashstep.bench.claim import Claim, judge
from flashstep.bench.experiment import Stated, is_of, margin
from flashstep.bench.ledger import Entry
from tests.bench.entries import MACHINE, at
from tests.bench.experiments import asked, in_turns, stated

DIGEST = "ab" * 32
FASTER = [892.0 + r % 2 for r in range(6)], [964.0 + r % 3 for r in range(6)]
CONTROL = [892.4 + (r + 1) % 2 for r in range(6)]
NOT_PLANNED = "This was not planned"


def planned() -> Arms:
    return in_turns(*FASTER, CONTROL, plan=DIGEST)


def claimed(arms: Arms, *, plan: Stated | None = None) -> Claim:
    return judge(arms, asked(stated=plan or stated(6, arms=3)), resamples=0)


def again(entry: Entry, **fields: object) -> Entry:
    return msgspec.structs.replace(entry, **({"id": entry.id[::-1] + "x"} | fields))


def test_what_is_exactly_as_planned_is_attested() -> None:
    claim = claimed(planned())
    assert claim.says == "different" and claim.plan == DIGEST and NOT_PLANNED not in claim.paragraph


ROLES: list[tuple[str, Callable[[Arms], Arms], str]] = [
    (
        "swapped",
        lambda arms: arms_of(arms.b, arms.a, arms.control),
        "has an arm A, and in its place stands B",
    ),
    (
        "control:B",
        lambda arms: arms_of(arms.control, arms.b),
        "has an arm A, and in its place stands control",
    ),
    ("A:A", lambda arms: arms_of(arms.a, arms.a, arms.control), "has an arm B, and in its place stands A"),
    (
        "without its control",
        lambda arms: arms_of(arms.a, arms.b),
        "has an arm control, and in its place stands nothing",
    ),
]
ROWS: list[tuple[str, Callable[[Arms], Arms], str]] = [
    (
        "another command",
        lambda arms: arms_of(
            arms.a,
            [
                msgspec.structs.replace(
                    e, origin=msgspec.structs.replace(e.origin, command="flashstep bench probe --fast")
                )
                for e in arms.b
            ],
            arms.control,
        ),
        "arm B was planned as 'flashstep bench probe', and its runs say 'flashstep bench probe --fast'",
    ),
    (
        "a round run twice",
        lambda arms: arms_of([*arms.a, again(arms.a[3])], arms.b, arms.control),
        "arm A was to run once in each round, and round 3 has 2 complete runs",
    ),
    (
        "all rounds twice",
        lambda arms: arms_of(*([*runs, *map(again, runs)] for runs in (arms.a, arms.b, arms.control))),
        "and round 0 has 2, round 1 has 2, round 2 has 2 and 3 more complete runs",
    ),
    (
        "a round too few",
        lambda arms: arms_of(arms.a, arms.b[:5], arms.control),
        "6 rounds were planned, and arm B has 5",
    ),
    (
        "a row deleted and run anew",
        lambda arms: arms_of(
            arms.a, [*arms.b[:2], again(arms.b[2], origin=at(40)), *arms.b[3:]], arms.control
        ),
        "runs are not in the plan's order",
    ),
    (
        "a row older than the plan",
        lambda arms: arms_of([again(arms.a[0], origin=at(-9)), *arms.a[1:]], arms.b, arms.control),
        "1 run(s) are older than the plan",
    ),
    (
        "rows of two plans",
        lambda arms: arms_of(arms.a, [again(arms.b[0], plan="cd" * 32), *arms.b[1:]], arms.control),
        "the runs carry the hash of a plan (abababababab, cdcdcdcdcdcd)",
    ),
    (
        "a row of no plan",
        lambda arms: arms_of(arms.a, [again(arms.b[0], plan=None), *arms.b[1:]], arms.control),
        "the runs carry the hash of a plan (abababababab, none)",
    ),
]


@pytest.mark.parametrize(("changed", "why"), [pytest.param(*rest, id=name) for name, *rest in ROLES + ROWS])
def test_rows_that_are_not_as_planned_are_not_claimed(changed: Callable[[Arms], Arms], why: str) -> None:
    claim = claimed(changed(planned()))
    assert claim.says == "refused" and claim.plan is None and claim.not_inferior is None
    assert why.lower() in claim.paragraph.lower()
    assert any(item.rule == "as planned" and item.stops == "claim" for item in claim.verdicts)


@pytest.mark.parametrize(
    "plan",
    [stated(6, arms=3, metric="ttft_ms"), stated(6, arms=3, alpha=0.01), stated(6, arms=3, margin="1%")],
)
def test_another_question_than_planned(plan: Stated) -> None:
    claim = claimed(planned(), plan=plan)
    assert claim.says == "refused" and "the plan asks for" in claim.paragraph.lower()


def test_a_plan_that_is_lost_is_missed() -> None:
    """Its rows are judged by it, or not at all; nor by another plan."""
    for question in (asked(), asked(stated=stated(6, arms=3)._replace(digest="cd" * 32))):
        claim = judge(planned(), question, resamples=0)
        assert claim.says == "refused" and claim.plan is None
        assert "judged by their plan, or not at all" in claim.paragraph


def test_rows_without_a_plan_are_claimed_as_not_planned() -> None:
    for question in (asked(), asked(stated=stated(6, arms=3))):
        claim = judge(in_turns(*FASTER, CONTROL), question, resamples=0)
        assert claim.says == "different" and claim.plan is None and NOT_PLANNED in claim.paragraph


def test_the_same_rows_in_both_arms_are_always_refused() -> None:
    arms = in_turns(*FASTER)
    claim = judge(arms_of(arms.a, arms.a), asked(), resamples=0)
    assert claim.says == "refused" and "6 entries stand in the arms more than once" in claim.paragraph


def test_only_what_ended_early_is_replaced() -> None:
    """Before or after the whole run; how often a round was begun stands in the paragraph."""
    arms = planned()
    died = again(arms.b[2], complete=False, metrics={}, faults=("died",))
    for runs in ([*arms.b, died], [*arms.b[:2], died, *arms.b[2:]], [died, again(died, id="x"), *arms.b]):
        claim = claimed(arms_of(arms.a, runs, arms.control))
        often = "B 2 2 times" if len(runs) == 8 else "B 2"
        assert claim.says == "different" and claim.plan == DIGEST
        assert f"Ended early and run again: {often}." in claim.paragraph


def test_a_margin_needs_the_plan() -> None:
    question = asked(margin=margin("2%", is_accuracy=False))
    assert judge(in_turns(*FASTER), question, resamples=0).not_inferior is None


@pytest.mark.parametrize(
    ("command", "recorded", "expected"),
    [
        (
            "flashstep bench probe --tokens 60",
            "flashstep bench probe --tokens 60 --ledger x --label A --round 0 --plan y",
            True,
        ),
        ("/other/bin/flashstep bench probe", "flashstep bench probe --ledger=x --label=A --round=0", True),
        ("env X=1 python -m flashstep eval recall", "flashstep eval recall", True),
        ("flashstep bench probe --tokens 60", "flashstep bench probe --tokens 61", False),
        ("flashstep bench probe", "flashstep bench probe --tokens 60", False),
        ("flashstep bench probe --tokens 60", "flashstep bench probe", False),
        (MACHINE.command, "flashstep", False),
        ("bench probe", "flashstep bench probe", False),
        (
            """sh -c 'x & flashstep bench serve --url u "$@"; kill %1' arm""",
            "flashstep bench serve --url u --round 1",
            True,
        ),
        (
            """sh -c 'x & flashstep bench serve --url u "$@"; kill %1' arm""",
            "flashstep bench serve --url u --seed 7",
            False,
        ),
        (
            """sh -c 'x & flashstep bench serve --url u $EXTRA "$@"' arm""",
            "flashstep bench serve --url u",
            False,
        ),
    ],
)
def test_commands_are_compared_without_place_and_program(command: str, recorded: str, expected: bool) -> None:
    assert is_of(command, recorded) is expected
