"""Failures, copies: what is left of a run must be a fair sample, and a run its own."""

import msgspec
import numpy as np
import pytest

from flashstep.bench.arms import Arms, arms_of
from flashstep.bench.claim import judge
from tests.bench.entries import answered, requests
from tests.bench.experiments import asked, in_turns


def loaded(failed_a: int, failed_b: int, *, of: int = 100) -> Arms:
    """Six rounds; the slowest of ``of`` requests fail. The arms are equally fast, in B the noise is 1 s higher a request."""
    arms = in_turns([0.0] * 6, [0.0] * 6)
    runs = []
    for place, (arm, failed) in enumerate(((arms.a, failed_a), (arms.b, failed_b))):
        times = [float(n) + place for n in range(of - failed)]
        runs.append([msgspec.structs.replace(e, samples=requests(ttft_ms=times), failed=failed) for e in arm])
    return arms_of(*runs)


def test_an_arm_that_loses_its_slow_requests_is_not_better() -> None:
    claim = judge(loaded(0, 60), asked("ttft_ms"), resamples=0)
    rules = {item.rule for item in claim.refusals}
    assert claim.says == "refused" and {"few failures", "equal failures"} <= rules
    assert "over 10% of arm B's requests failed (round 0: 60%" in claim.paragraph.lower().replace(
        "b's", "B's"
    ).replace("arm b", "arm B")


def test_failures_of_one_arm_alone_spoil_a_claim_and_a_few_are_named() -> None:
    one_sided = judge(loaded(0, 2), asked("ttft_ms"), resamples=0)
    assert one_sided.says == "refused" and {item.rule for item in one_sided.refusals} == {"equal failures"}
    alike = judge(loaded(1, 1, of=1000), asked("ttft_ms"), resamples=0)
    assert alike.says == "different", "one in 1,000 is no reason to run again"
    assert "Failed, and in no figure: 6 of 6,000 of A, 6 of 6,000 of B." in alike.paragraph


def test_a_share_of_10_percent_is_allowed() -> None:
    """H4; of both arms alike."""
    assert judge(loaded(10, 10), asked("ttft_ms"), resamples=0).says == "different"
    over = judge(loaded(11, 11), asked("ttft_ms"), resamples=0)
    assert {item.rule for item in over.refusals} == {"few failures"}


def test_copies_of_one_run_are_no_runs() -> None:
    rng = np.random.default_rng(1)
    right = rng.random((2, 50)) < 0.8
    for copies, stops in ((4, "claim"), (2, "nothing")):
        arms = arms_of(
            *(
                [
                    answered(
                        label,
                        r,
                        right[place],
                        tokens=max(r, copies - 1),
                        minute=2 * r + ((place == 1) == (r % 2 == 0)),
                    )
                    for r in range(4)
                ]
                for place, label in enumerate("AB")
            )
        )
        found = {
            item.stops
            for item in judge(arms, asked("accuracy"), resamples=0).verdicts
            if item.rule == "copies"
        }
        assert found == {stops}


@pytest.mark.parametrize(
    ("text", "told"), [("ttft_ms:p99", True), ("ttft_ms:p90", False), ("ttft_ms", False)]
)
def test_a_percentile_beyond_all_samples_is_told(text: str, told: bool) -> None:
    claim = judge(loaded(0, 0, of=50), asked(text), resamples=0)
    assert ("percentile" in {item.rule for item in claim.verdicts}) is told
