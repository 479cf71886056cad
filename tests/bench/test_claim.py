"""What may be claimed: every rule that stops it, the words, and how often arms without a difference are called different."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from scipy import stats

from flashstep.bench.arms import Arms, arms_of
from flashstep.bench.claim import Claim, as_builtins, figure, judge
from flashstep.bench.claim_picture import draw
from flashstep.bench.compare import compare
from flashstep.bench.experiment import margin
from flashstep.bench.measure import measure
from tests.bench.entries import answered, at, requests
from tests.bench.experiments import asked, in_turns, stated
from tests.bench.stats.power import power

SIMULATIONS = 10_000
MOST_FALSE = stats.binom.ppf(0.999, SIMULATIONS, 0.05)
FASTER = [892.0 + r % 2 for r in range(6)], [964.0 + r % 3 for r in range(6)]


def stops(claim: Claim) -> dict[str, str]:
    """The rules that stop something."""
    return {item.rule: item.stops for item in claim.refusals}


def changed(arms: Arms, arm: str, place: int, **fields: Any) -> Arms:
    runs = list(getattr(arms, arm))
    runs[place] = msgspec.structs.replace(runs[place], **fields)
    return msgspec.structs.replace(arms, **{arm: tuple(runs)})


def test_a_claim_in_words() -> None:
    control = [892.4 + (r + 1) % 2 for r in range(6)]
    arms = in_turns(*FASTER, control, plan="ab" * 32)
    claim = judge(arms, asked(stated=stated(6, arms=3)))
    assert claim.says == "different" and claim.refusals == ()
    assert claim.paragraph == (
        "B's output throughput is higher than A's by 72.5 tokens/s (+8.12%), which is better: 96.9% interval +71 to +74 tokens/s "
        "for B - A; exact sign-flip over 6 rounds p = 2/64 = 0.031, at the level 0.05. "
        "Design: 6 rounds of serve, both arms in each, on node7 (H200, driver 580.1). "
        "The build of A against itself (control) differs by +0.4 tokens/s (-0.6 to +1.4 tokens/s, p = 0.344). "
        "B against the control differs by +72.1 tokens/s (+70.6 to +73.6 tokens/s, p = 0.031). "
        "Metric, level, margin, arms and rounds stand in the plan abababababab of 2026-11-30T23:59:00+00:00, written before the "
        "first run and carried by every run."
    )
    assert claim.arms[1].entries == tuple(e.id for e in arms.b)


def test_a_slower_arm_is_called_worse() -> None:
    slower = judge(in_turns(FASTER[1], FASTER[0]), asked())
    assert "lower than A's by 72.5 tokens/s (-7.51%), which is worse" in slower.paragraph
    samples = [[requests(ttft_ms=[base + r, base + 2 + r]) for r in range(6)] for base in (50, 40)]
    arms = in_turns(*FASTER)
    arms = arms_of(
        *(
            [msgspec.structs.replace(e, samples=samples[n][e.round]) for e in runs]
            for n, runs in enumerate((arms.a, arms.b))
        )
    )
    found = judge(arms, asked("ttft_ms:p90"))
    assert "B's p90 time to first token is lower than A's by 10 ms" in found.paragraph
    assert "which is better" in found.paragraph
    assert [item.measure.metric for item in found.secondary] == ["output_tps"]
    assert "throughput" not in found.paragraph, "only the metric that was asked for gets words"


def test_no_difference_is_not_equality() -> None:
    arms = in_turns([100, 101, 102, 100, 101, 99], [100.5, 100.5, 102, 101, 100, 99.5])
    claim = judge(arms, asked())
    assert claim.says == "undecided"
    assert (
        "No difference in output throughput is shown: B - A is +0.08333 tokens/s (+0.08%)" in claim.paragraph
    )
    assert "That is not equality" in claim.paragraph
    assert claim.paragraph.endswith(
        "This was not planned: metric, level, arms and number of runs may have been chosen after the results were seen."
    )


Broken = Callable[[Arms], Arms]
BROKEN: list[tuple[str, Broken, str, str]] = [
    (
        "two runs an arm",
        lambda arms: arms_of(arms.a[:1], arms.b[:1]),
        "arm A has 1 run, and its noise from run to run is not known",
        "run each arm more often",
    ),
    (
        "one machine",
        lambda arms: changed(arms, "b", 2, origin=at(5, machine="node8")),
        "different machines: A node7; B node7, node8",
        "on one machine",
    ),
    (
        "one machine",
        lambda arms: changed(arms, "a", 2, origin=at(4, driver="590.0")),
        "different drivers: A 580.1, 590.0; B 580.1",
        "on one machine",
    ),
    (
        "one machine",
        lambda arms: changed(arms, "b", 2, origin=at(5, gpus=("H100, GPU-2, 580.1, 1, 1, 1, 1",))),
        "different GPUs",
        "on one machine",
    ),
    (
        "one build an arm",
        lambda arms: changed(arms, "b", 2, origin=at(5, commit="fedcba987654")),
        "arm B has runs of different commits: 0123456789ab, fedcba987654",
        "from one commit",
    ),
    (
        "one kind",
        lambda arms: changed(arms, "b", 2, kind="replay"),
        "different kinds: A serve; B serve, replay",
        "the same command",
    ),
    (
        "equal settings",
        lambda arms: changed(arms, "b", 2, settings={"requests": 200}),
        "requests is not the same in all runs: 100, 200",
        "same requests",
    ),
    (
        "equal seeds",
        lambda arms: changed(arms, "b", 2, seed=77),
        "the seeds of arms A and B are not the same in round 2",
        "same --seed",
    ),
    (
        "equal acceptance",
        lambda arms: changed(arms, "b", 2, falsified_by=("synthetic acceptance",)),
        "some runs have synthetic acceptance and others have not",
        "with rejection_sample_method block or standard, or none",
    ),
    (
        "equal routing",
        lambda arms: changed(arms, "b", 2, falsified_by=("uniform routing",)),
        "some runs have uniform routing and others have not",
        "with --routing real, or none",
    ),
    (
        "equal cache",
        lambda arms: changed(arms, "b", 2, falsified_by=("filled cache",)),
        "some runs have filled cache and others have not",
        "without --fill-cache, or none",
    ),
    (
        "complete runs",
        lambda arms: changed(arms, "b", 2, complete=False, faults=("the server died",)),
        "arm B has 1 run(s) that ended before their plan (round 2): the server died",
        "goes on where it stopped",
    ),
    (
        "metric",
        lambda arms: changed(arms, "b", 2, metrics={}),
        "1 run(s) of arm B have no output_tps",
        "name a metric that all runs have",
    ),
    (
        "enough runs",
        lambda arms: arms_of(arms.a[:4], arms.b[:4]),
        "with 4 and 4 runs the smallest p there is is 0.125, above the level 0.05",
        "run 6 rounds",
    ),
    (
        "runs in turns",
        lambda arms: arms_of(
            [msgspec.structs.replace(e, origin=at(2 * e.round)) for e in arms.a],
            [msgspec.structs.replace(e, origin=at(2 * e.round + 1)) for e in arms.b],
        ),
        "arm A ran before arm B in 6 of 6 rounds; each must run first equally often",
        "run the arms in turns",
    ),
]


@pytest.mark.parametrize(("rule", "broken", "why", "remedy"), BROKEN)
def test_a_design_that_supports_no_claim(rule: str, broken: Broken, why: str, remedy: str) -> None:
    """The same arms without the flaw are claimed; with it they are not, and the paragraph says why and what to do."""
    arms = in_turns(*FASTER)
    assert judge(arms, asked(), resamples=0).says == "different"
    claim = judge(broken(arms), asked(), resamples=0)
    assert claim.says == "refused" and stops(claim) == {rule: "claim"}
    assert claim.paragraph.startswith("No claim about output throughput.")
    assert why.lower() in claim.paragraph.lower() and remedy in claim.paragraph
    assert "higher" not in claim.paragraph


def accuracies(rng: np.random.Generator, *, shift: float = 0.0, runs: int = 4, n: int = 300) -> Arms:
    """Questions of unequal difficulty, answered anew by each run; B is right by ``shift`` more often."""
    chance = rng.beta(8, 1, n)
    arms = []
    for label, more in (("A", 0.0), ("B", shift)):
        right = rng.random((runs, n)) < np.clip(chance + more, 0, 1)
        arms.append(
            [
                answered(label, r, right[r], minute=2 * r + ((label == "B") == (r % 2 == 0)))
                for r in range(runs)
            ]
        )
    return arms_of(*arms)


def test_accuracy_in_words() -> None:
    claim = judge(accuracies(np.random.default_rng(2), shift=-0.08), asked("accuracy"), resamples=0)
    assert claim.says == "different"
    assert re.search(
        r"B's accuracy is lower than A's by 9\.\d\d points, which is worse: 95% interval -\d+\.\d\d to -\d\.\d\d points "
        r"for B - A; sign-flip over the 1\d\d of 300 questions that differ p = .*, exchange of the runs p = 2/70 = 0\.029",
        claim.paragraph,
    )


@pytest.mark.parametrize(
    "word", ["synthetic acceptance", "uniform routing", "recorded routing", "filled cache", "something new"]
)
def test_answers_that_are_not_the_models_are_no_accuracy(word: str) -> None:
    """In both arms alike, which for speed is only told (E30)."""
    arms = accuracies(np.random.default_rng(2), shift=-0.08)
    wrong = arms_of(
        *([msgspec.structs.replace(e, falsified_by=(word,)) for e in runs] for runs in (arms.a, arms.b))
    )
    claim = judge(wrong, asked("accuracy", margin=margin("1pt", is_accuracy=True)), resamples=0)
    assert (
        claim.says == "refused"
        and claim.not_inferior is None
        and stops(claim)[f"real {word.split()[-1]}"] == "claim"
    )
    speed = judge(in_turns(*FASTER, falsified_by=(word,)), asked(), resamples=0)
    assert speed.says == "different" and word.split()[-1] in {item.rule for item in speed.verdicts}


def test_seeds_of_runs_that_are_no_pairs() -> None:
    """As often in both arms; of other numbers of runs, the same ones."""
    runs = [msgspec.structs.replace(e, round=0) for e in in_turns(*FASTER).a]
    for other, equal in (
        (runs[:6], True),
        ([*runs[:5], msgspec.structs.replace(runs[5], seed=9)], False),
        ([*runs, runs[0]], True),
        ([*runs, msgspec.structs.replace(runs[5], seed=9)], False),
    ):
        claim = judge(arms_of(runs, other), asked(), resamples=0)
        assert ("equal seeds" not in stops(claim)) is equal


def test_accuracy_of_few_runs_has_no_difference_but_may_have_a_margin() -> None:
    """2 + 2 runs cannot reach the level; questions and runs still bound how much worse B can be."""
    arms = accuracies(np.random.default_rng(3), runs=2, n=20_000)
    arms = arms_of(*([msgspec.structs.replace(e, plan="ab" * 32) for e in runs] for runs in (arms.a, arms.b)))
    question = asked(
        "accuracy", margin=margin("4pt", is_accuracy=True), stated=stated(2, metric="accuracy", margin="4pt")
    )
    claim = judge(arms, question, resamples=0)
    assert (
        claim.says == "refused"
        and claim.not_inferior is True
        and stops(claim) == {"enough runs": "difference"}
    )
    assert (
        "B is not worse than A by 4.00 points or more, the margin that was stated before" in claim.paragraph
    )
    assert "points, over questions and over runs)" in claim.paragraph
    worse = accuracies(np.random.default_rng(3), runs=2, n=20_000, shift=-0.04)
    worse = arms_of(
        *([msgspec.structs.replace(e, plan="ab" * 32) for e in runs] for runs in (worse.a, worse.b))
    )
    assert judge(worse, question, resamples=0).not_inferior is False


def test_a_margin_counts_only_if_the_runs_carry_the_plan() -> None:
    values = [100, 101, 102, 100, 101, 99], [100.5, 100.5, 102, 101, 100, 99.5]
    given = {"margin": "2%", "stated": stated(6, margin="2%")}
    question = asked(margin=margin("2%", is_accuracy=False), stated=given["stated"])
    good = judge(in_turns(*values, plan="ab" * 32), question, resamples=0)
    assert good.not_inferior is True and good.margin == pytest.approx(0.02 * 100.5) and good.plan == "ab" * 32
    assert "B is not worse than A by 2.01 tokens/s or more, the margin that was stated" in good.paragraph
    unplanned = judge(in_turns(*values), question, resamples=0)
    assert unplanned.not_inferior is None and stops(unplanned) == {"margin beforehand": "non-inferiority"}
    assert "The margin was not stated before the runs" in unplanned.paragraph and unplanned.plan is None
    faster = judge(in_turns(*FASTER, plan="ab" * 32), question, resamples=0)
    assert faster.not_inferior is True and faster.says == "different"


@pytest.mark.parametrize(
    ("text", "is_accuracy", "said"),
    [("1", False, 1.0), ("2%", False, 2.0), ("2%", True, 2.0), ("1pt", True, 0.01), (".5", False, 0.5)],
)
def test_margins(text: str, is_accuracy: bool, said: float) -> None:
    assert margin(text, is_accuracy=is_accuracy).amount(100.0) == pytest.approx(said)


@pytest.mark.parametrize(
    ("text", "is_accuracy", "said"),
    [
        *((text, False, "it must be above 0") for text in ("", "-1", "0", "1 %pt", "much")),
        ("1pt", False, "points are of accuracy"),
        ("1", True, "is 1pt meant?"),
    ],
)
def test_margins_that_are_none(text: str, is_accuracy: bool, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        margin(text, is_accuracy=is_accuracy)


def test_a_control_that_differs_from_itself() -> None:
    """By less than B does it is told; else there is no claim."""
    small = judge(in_turns(*FASTER, [value + 5 for value in FASTER[0]]), asked(), resamples=0)
    told = [item.why for item in small.verdicts if item.rule == "control"]
    assert small.says == "different" and "control: p = 0.031), by less than B does" in told[0]
    claim = judge(in_turns(*FASTER, [value - 80 for value in FASTER[0]]), asked(), resamples=0)
    assert stops(claim) == {"control": "claim"}
    assert (
        "The build of A differs from itself (control: p = 0.031), by as much as B may differ"
        in claim.paragraph
    )


def test_b_must_differ_from_the_control_too() -> None:
    """The control's runs lie on both sides of B's: not to be told from A is no proof that a build equals itself."""
    noisy = [value + gap for value, gap in zip(FASTER[0], (60, -60, 65, -90, 55, -70), strict=True)]
    claim = judge(in_turns(*FASTER, noisy), asked(), resamples=0)
    assert claim.control is not None and claim.control.p > 0.05
    assert claim.says == "different", "all six differences have one sign"
    wild = [value + gap for value, gap in zip(FASTER[0], (90, -60, 100, -90, 76, -70), strict=True)]
    claim = judge(in_turns(*FASTER, wild), asked(), resamples=0)
    assert claim.says == "refused" and stops(claim) == {"control": "difference"}
    assert "not in the same way from the control (p = " in claim.paragraph


def test_a_margin_must_be_cleared_against_the_control_too() -> None:
    values = [100, 101, 102, 100, 101, 99], [100.5, 100.5, 102, 101, 100, 99.5]
    question = asked(margin=margin("2%", is_accuracy=False), stated=stated(6, margin="2%", arms=3))
    for more, clears in ((0.2, True), (1.5, False)):
        control = [value + more * (-1) ** n for n, value in enumerate(values[0])]
        claim = judge(in_turns(*values, control, plan="ab" * 32), question, resamples=0)
        assert claim.not_inferior is clears, claim.paragraph


def test_which_of_the_two_tests_of_accuracy_failed() -> None:
    """The questions tell the arms apart, the runs do not: one bad run of B."""
    rng = np.random.default_rng(4)
    right = rng.random((8, 300)) < 0.9
    right[4] &= rng.random(300) < 0.6
    arms = arms_of(
        *(
            [
                answered(label, r, right[4 * place + r], minute=2 * r + ((place == 1) == (r % 2 == 0)))
                for r in range(4)
            ]
            for place, label in enumerate("AB")
        )
    )
    claim = judge(arms, asked("accuracy"), resamples=0)
    assert claim.says == "undecided" and claim.primary is not None and claim.primary.interval.high < 0
    assert (
        "of which the one over questions reaches and the one over runs does not reach the level 0.05"
        in claim.paragraph
    )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (19670.4, "19,670"),
        (72.5, "72.5"),
        (-0.08333, "-0.08333"),
        (0, "0"),
        (1.0, "1"),
        (120.0, "120"),
        (3e-7, "0.0000003"),
    ],
)
def test_figures_have_no_exponent(value: float, said: str) -> None:
    assert figure(value) == said


def test_what_is_told_and_stops_nothing() -> None:
    arms = in_turns(*FASTER, subject={"build": "same"}, faults=("it rained",))
    dirty = arms_of(
        *(
            [msgspec.structs.replace(e, origin=msgspec.structs.replace(e.origin, dirty=True)) for e in runs]
            for runs in (arms.a, arms.b)
        )
    )
    claim = judge(dirty, asked(), resamples=0)
    told = {item.rule: item.why for item in claim.verdicts if item.stops == "nothing"}
    assert claim.says == "different"
    assert (
        "both arms say the same commit, and what differs between them stands nowhere" in told["changed files"]
    )
    assert told.keys() >= {"faults", "control", "plan", "changed files"}
    same = judge(in_turns(*FASTER, subject={"build": "same"}), asked(), resamples=0)
    assert "same subject" in {item.rule for item in same.verdicts}
    assert "same subject" not in {
        item.rule for item in judge(in_turns(*FASTER), asked(), resamples=0).verdicts
    }
    assert [item.why for item in same.verdicts if item.rule == "libraries"] == []


def test_arms_without_a_common_request() -> None:
    arms = in_turns(*FASTER)
    sides = ([requests(ttft_ms=[1, None])] * 6, [requests(ttft_ms=[None, 1])] * 6)
    arms = arms_of(
        *(
            [msgspec.structs.replace(e, samples=side[0]) for e in runs]
            for side, runs in zip(sides, (arms.a, arms.b), strict=True)
        )
    )
    claim = judge(arms, asked("ttft_ms"))
    assert claim.says == "refused" and claim.primary is None and stops(claim) == {"common samples": "claim"}
    assert json.loads(msgspec.json.encode(as_builtins(claim)))["primary"] is None
    with pytest.raises(ValueError, match="there is nothing to draw"):
        draw(claim, Path("x.svg"))


def test_the_claim_as_json_holds_what_follows_from_it() -> None:
    claim = judge(in_turns(*FASTER, FASTER[0]), asked())
    plain = json.loads(msgspec.json.encode(as_builtins(claim)))
    assert plain["primary"]["differences"] == [b - a for a, b in zip(*FASTER, strict=True)]
    assert plain["primary"]["p"] == 2 / 64 and plain["says"] == "different"
    assert plain["control"]["difference"] == 0 and plain["arms"][0]["entries"] == list(claim.arms[0].entries)


def test_the_picture_is_the_same_for_the_same_numbers(tmp_path: Path) -> None:
    claim = judge(in_turns(*FASTER, [value + 0.5 * (-1) ** n for n, value in enumerate(FASTER[0])]), asked())
    one, other, png = tmp_path / "1.svg", tmp_path / "2.svg", tmp_path / "x.png"
    for file in (one, other, png):
        draw(claim, file)
    assert one.read_bytes() == other.read_bytes() and png.read_bytes()[:4] == b"\x89PNG"
    assert one.read_text().count('id="PathCollection') == 5  # three arms, two rows of differences


def claimed(
    rng: np.random.Generator, *, effect: float, simulations: int, rounds: int = 6, control: bool = False
) -> int:
    """How often the whole pipeline, from ledger entries to the claim, says that the arms differ.

    Run noise is skewed, rounds share a level that wanders.
    """
    noise = rng.gamma(4, 0.5, (3, simulations, rounds)) + rng.normal(0, 5, (simulations, rounds)).cumsum(1)
    noise[1] += effect
    template = in_turns(*(row.tolist() for row in noise[:2, 0]), noise[2, 0].tolist() if control else ())
    question, count = asked(), 0
    for n in range(simulations):
        arms = {
            name: tuple(
                msgspec.structs.replace(e, metrics={"output_tps": float(noise[place, n, e.round])})
                for e in getattr(template, name)
            )
            for place, name in enumerate(("a", "b", "control"))
        }
        count += judge(Arms(**arms), question, resamples=0).says == "different"
    return count


def test_arms_without_a_difference_are_claimed_different_at_the_stated_rate() -> None:
    found = claimed(np.random.default_rng(5), effect=0, simulations=SIMULATIONS)
    print(f"{found} of {SIMULATIONS} claims at 0.05 without a difference; 2/64 is {SIMULATIONS / 32:.0f}")
    assert 0.5 * SIMULATIONS / 32 <= found <= MOST_FALSE


def test_a_control_and_a_thousand_experiments_without_a_difference() -> None:
    found = claimed(np.random.default_rng(7), effect=0, simulations=1000, control=True)
    assert found <= stats.binom.ppf(0.999, 1000, 0.05)


def test_a_known_difference_is_claimed_with_the_expected_power() -> None:
    """Differences of rounds have spread root 2; the pipeline finds 2.5 of it within 12 points of the t test's power, 8 rounds."""
    many, effect = 1000, 2.0
    expected = power(effect, sd=2**0.5, n=8, alpha=0.05)
    found = claimed(np.random.default_rng(9), effect=effect, simulations=many, rounds=8) / many
    print(f"expected {expected:.3f}, claimed {found:.3f}")
    assert expected - 0.06 <= found <= expected + 0.04


@pytest.mark.parametrize("runs", [2, 4])
def test_a_margin_of_accuracy_is_missed_at_the_stated_rate_when_runs_differ(runs: int) -> None:
    """B is worse by the margin, and each run by 2 points more or less: over questions alone it would pass in 8%."""
    rng, many, amount = np.random.default_rng(13), 1000, 0.02
    passed = over_questions = 0
    for _ in range(many):
        chance = rng.beta(8, 2, 300)
        arms = [
            [
                answered(
                    "AB"[place],
                    r,
                    (rng.random(300) < np.clip(chance - shift + rng.normal(0, 0.02), 0, 1)).tolist(),
                )
                for r in range(runs)
            ]
            for place, shift in enumerate((0.0, amount))
        ]
        found = compare(*arms, measure("accuracy"), resamples=0)
        passed += all(bound.low > -amount for bound in found.bounds)
        over_questions += found.interval.low > -amount
    print(f"{passed} of {many} false claims of non-inferiority, {over_questions} over questions alone")
    assert passed <= stats.binom.ppf(0.999, many, 0.025) < over_questions


@pytest.mark.slow
def test_accuracy_without_a_difference_is_claimed_at_most_at_the_stated_rate() -> None:
    rng = np.random.default_rng(11)
    many = SIMULATIONS
    found = sum(
        judge(accuracies(rng, n=100), asked("accuracy"), resamples=0).says == "different" for _ in range(many)
    )
    print(f"{found} of {many} claims about accuracy at 0.05 without a difference")
    assert found <= MOST_FALSE
