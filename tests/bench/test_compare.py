"""What is scored and held against each other: common samples, each metric's statistic, pairs of rounds, jobs, questions."""

import msgspec
import numpy as np
import pytest

from flashstep.bench.compare import compare
from flashstep.bench.ledger import Samples
from flashstep.bench.measure import measure
from tests.bench.entries import answered, requests, run
from tests.bench.experiments import in_turns


def test_only_requests_that_both_arms_completed_are_scored() -> None:
    """E21: the faster arm completes more, and other, requests; each round by itself."""
    a = [run("A", r, 1.0, samples=requests(ttft_ms=[10, 20, None, 40])) for r in range(2)]
    b = [run("B", r, 1.0, samples=requests(ttft_ms=[11, None, 30, 42, 900])) for r in range(2)]
    found = compare(a, b, measure("ttft_ms"))
    assert found.a == (25, 25) and found.b == (26.5, 26.5)
    assert found.scoring is not None
    counts = found.scoring
    assert (counts.scored, counts.dropped_a, counts.dropped_b) == (4, 2, 4)
    assert (counts.without_a, counts.without_b, counts.unit) == (2, 2, "request")


def test_no_common_request_is_told() -> None:
    a = [run("A", r, 1.0, samples=requests(ttft_ms=[10, None])) for r in range(2)]
    b = [run("B", r, 1.0, samples=requests(ttft_ms=[None, 10])) for r in range(2)]
    with pytest.raises(ValueError, match="no request has ttft_ms in both arms"):
        compare(a, b, measure("ttft_ms"))


def test_p90_interactivity_is_the_slow_tail_of_the_common_requests() -> None:
    """E18 and H13: an ITL whose p90 is 2.0618 ms gives 485.0 tokens/s; requests of one arm only do not move it."""
    itl = list(np.linspace(1, 2.0618, 91)) + [2.0618] + [float(x) for x in np.linspace(2.1, 3, 9)]
    assert np.percentile(itl, 90) == pytest.approx(2.0618, abs=0.002)
    a = [run("A", r, 1.0, samples=requests(itl_ms=[*itl, None])) for r in range(2)]
    b = [run("B", r, 1.0, samples=requests(itl_ms=[*itl, 500.0])) for r in range(2)]
    found = compare(a, b, measure("p90_interactivity_tps"))
    assert found.a == found.b == pytest.approx((485.0, 485.0), abs=0.5)
    kept = [
        run(label, r, 1.0, metrics={"p90_interactivity_tps": 891.9 + r}) for label in "AB" for r in (0, 1)
    ]
    assert compare(kept[:2], kept[2:], measure("p90_interactivity_tps")).a == (891.9, 892.9)


def test_a_probe_is_scored_by_its_median_step() -> None:
    steps = Samples(unit="step", keys=tuple("abcd"), columns={"step_us": (1.0, 2.0, 3.0, 1000.0)})
    runs = [run(label, r, 1.0, samples=steps) for label in "AB" for r in (0, 1)]
    assert compare(runs[:2], runs[2:], measure("step_us")).a == (2.5, 2.5)
    assert compare(runs[:2], runs[2:], measure("step_us:mean")).a == (251.5, 251.5)
    assert compare(runs[:2], runs[2:], measure("step_us:p90")).a[0] == pytest.approx(
        np.percentile([1, 2, 3, 1000], 90)
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft", "there is no metric 'ttft'; there are acceptance_length"),
        ("ttft_ms:best", "the statistic is 'best'; it must be mean, median, or p"),
        ("ttft_ms:p0", "the statistic is 'p0'"),
        ("accuracy:p90", "accuracy is one value of a question and has no p90"),
        ("output_tps:mean", "output_tps is one value of a run and has no mean"),
    ],
)
def test_a_metric_that_is_none(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        measure(text)


def test_rounds_are_pairs_and_cancel_what_they_share() -> None:
    """A drift of 100 a round does not hide a difference of 1 to 6."""
    levels = [100 * r for r in range(6)]
    arms = in_turns(levels, [level + r + 1 for r, level in enumerate(levels)])
    found = compare(arms.a, arms.b, measure("output_tps"))
    assert found.rounds == tuple(range(6)) and found.differences == (1, 2, 3, 4, 5, 6)
    assert found.exchanged.tested.count == "2/64" and found.difference == 3.5 and found.favours == "B"
    assert (found.interval.low, found.interval.high) == (1, 6)
    assert found.bootstrap[0].words == "BCa over 6 rounds"
    assert found.welch is not None and found.welch.p > 0.9


def test_runs_that_are_no_pairs_are_exchanged_within_jobs() -> None:
    values = [0.9067, 0.9030, 0.9075, 0.9030], [0.8999, 0.8992, 0.9014, 0.9014]
    a, b = ([run(label, 0, v) for v in arm] for label, arm in zip("AB", values, strict=True))
    assert compare(a, b, measure("output_tps")).exchanged.tested.count == "2/70"
    jobs = ["x", "x", "y", "z"]
    a, b = (
        [run(label, 0, v, job=job) for v, job in zip(arm, jobs, strict=True)]
        for label, arm in zip("AB", values, strict=True)
    )
    found = compare(a, b, measure("output_tps"))
    assert found.exchanged.tested.count == "2/24" and not found.rounds
    assert found.bootstrap[0].words == "BCa over 4 and 4 runs"


def test_a_round_that_one_arm_lacks_is_no_pair() -> None:
    a = [run("A", r, float(r)) for r in range(3)]
    b = [run("B", r, r + 1.0) for r in (0, 2)]
    found = compare(a, b, measure("output_tps"))
    assert found.rounds == (0, 2) and found.differences == (1, 1)


def test_the_bootstrap_resamples_rounds_and_requests() -> None:
    rng = np.random.default_rng(1)
    a, b = (
        [run(label, r, 1.0, samples=requests(ttft_ms=list(rng.normal(50 + n, 5, 40)))) for r in range(6)]
        for n, label in enumerate("AB")
    )
    found = compare(a, b, measure("ttft_ms:p90"), resamples=200)
    within = "percentiles, resampling 6 rounds and the requests within each"
    assert [item.words for item in found.bootstrap] == ["BCa over 6 rounds", within], (
        "other seeds, other requests"
    )
    a, b = ([msgspec.structs.replace(e, seed=1) for e in runs] for runs in (a, b))
    words = [item.words for item in compare(a, b, measure("ttft_ms:p90"), resamples=200).bootstrap]
    assert words[1] == "percentiles, resampling 6 rounds and the 40 requests that they share"
    b[3] = run("B", 3, 1.0, samples=requests(ttft_ms=[*rng.normal(51, 5, 39), None]))
    words = [item.words for item in compare(a, b, measure("ttft_ms"), resamples=200).bootstrap]
    assert words[1] == "percentiles, resampling 6 rounds and the requests within each"


def published(counts: list[tuple[int, int]], n: int = 1319) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Runs of both arms in which ``counts`` questions are right in one only, pair by pair of runs."""
    ours, theirs = [], []
    for only_a, only_b in counts:
        right_a, right_b = np.ones(n), np.ones(n)
        right_b[:only_a], right_a[only_a : only_a + only_b] = 0, 0
        ours.append(right_a)
        theirs.append(right_b)
    return ours, theirs


def test_accuracy_of_the_published_counts() -> None:
    counts = [(34, 25), (35, 25), (34, 30), (40, 35)]
    ours, theirs = published(counts)
    a = [answered("A", r, right, tokens=r) for r, right in enumerate(ours)]
    b = [answered("B", r, right, tokens=r) for r, right in enumerate(theirs)]
    found = compare(a, b, measure("accuracy"), resamples=200)
    assert found.questions is not None
    pairs = found.questions.mcnemar
    assert [(pair.only_a, pair.only_b) for pair in pairs] == counts
    assert [round(pair.tested.p, 3) for pair in pairs] == [0.298, 0.245, 0.708, 0.644]
    assert found.difference == pytest.approx(sum(b - a for a, b in counts) / 4 / 1319)
    assert found.questions.sign_flip.exact and found.questions.count == 1319
    right = [np.array([entry.samples.columns["right"] for entry in arm]) for arm in (a, b)]
    differences = right[1].mean(0) - right[0].mean(0)
    assert found.questions.mean.se == pytest.approx(differences.std(ddof=1) / 1319**0.5)
    assert found.p == max(found.questions.sign_flip.p, found.exchanged.tested.p)
    assert found.bootstrap[0].words == "BCa over 1,319 questions"


def test_arms_with_other_numbers_of_runs_and_questions() -> None:
    """Each question counts by its share of right answers; only questions that all runs answered are scored."""
    a = [answered("A", 0, np.array([1, 0, 1, 1])), answered("A", 1, np.array([1, 1, 1, 1]))]
    b = [answered("B", r, np.array([1, 0, 0])) for r in range(3)]
    found = compare(a, b, measure("accuracy"))
    assert found.questions is not None and found.questions.count == 3
    assert found.difference == pytest.approx((0 - 0.5 - 1) / 3)
    assert found.scoring is not None and found.scoring.dropped_a == 2 and found.scoring.dropped_b == 0
    assert found.questions.sign_flip.p == pytest.approx(0.5) and found.questions.differing == 2


def test_another_statistic_than_the_run_summed_up_needs_samples() -> None:
    runs = [run(label, r, 1.0, metrics={"ttft_ms": 50.0 + r}) for label in "AB" for r in (0, 1)]
    found = compare(runs[:2], runs[2:], measure("ttft_ms"))
    assert found.a == (50, 51) and found.words == "time to first token (each run's own figure)"
    with pytest.raises(ValueError, match="ttft_ms is not in"):
        compare(runs[:2], runs[2:], measure("ttft_ms:p90"))


def test_a_figure_of_the_whole_run_is_the_runs_own() -> None:
    """A chain's is the mean of its shapes' medians, not of all replays."""
    replays = Samples(unit="replay", keys=("a", "b"), columns={"chain_us": (1.0, 2.0)})
    runs = [run(label, r, 1.0, samples=replays, metrics={"chain_us": 7.0}) for label in "AB" for r in (0, 1)]
    found = compare(runs[:2], runs[2:], measure("chain_us"))
    assert found.a == (7, 7) and found.scoring is None


def test_steps_of_another_run_are_other_steps() -> None:
    """E11: with drafts a run has fewer steps; each is the median of its own, and none is dropped."""
    few = Samples(
        unit="step", keys=tuple(map(str, range(25))), columns={"step_us": tuple(100.0 + n for n in range(25))}
    )
    many = Samples(
        unit="step",
        keys=tuple(map(str, range(101))),
        columns={"step_us": tuple(float(n) for n in range(101))},
    )
    a, b = ([run(label, r, 1.0, samples=of) for r in (0, 1)] for label, of in (("A", many), ("B", few)))
    found = compare(a, b, measure("step_us"))
    assert found.a == (50, 50) and found.b == (112, 112) and found.scoring is None
    assert found.words == "median step time"


def test_an_itl_of_0_is_told() -> None:
    runs = [run(label, r, 1.0, samples=requests(itl_ms=[0.0, 0.0])) for label in "AB" for r in (0, 1)]
    with pytest.raises(ValueError, match="the inter-token latency is 0 ms"):
        compare(runs[:2], runs[2:], measure("p90_interactivity_tps"))


def test_answers_given_again_are_one_run() -> None:
    a = [answered("A", r, np.array([1, 0, 1, 1])) for r in range(3)]
    b = [answered("B", r, np.array([1, 0, 0, 1]), tokens=r) for r in range(3)]
    found = compare(a, b, measure("accuracy"))
    assert (len(found.a), len(found.b)) == (1, 3)
