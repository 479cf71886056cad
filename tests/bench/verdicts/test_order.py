"""Order and processes: what else than the build could have made a difference."""

import msgspec
import pytest

from flashstep.bench.arms import Arms, arms_of
from flashstep.bench.claim import Claim, judge
from flashstep.bench.ledger import Entry
from tests.bench.entries import at
from tests.bench.experiments import asked, in_turns

FASTER = [892.0 + r % 2 for r in range(6)], [964.0 + r % 3 for r in range(6)]


def claimed(arms: Arms) -> Claim:
    return judge(arms, asked(), resamples=0)


def of_jobs(*jobs: list[str | None], **fields: object) -> Arms:
    arms = in_turns(*FASTER)
    return arms_of(
        *(
            [msgspec.structs.replace(e, job=job, **fields) for e, job in zip(runs, found, strict=True)]
            for runs, found in zip((arms.a, arms.b), jobs, strict=True)
        )
    )


def test_paired_rounds_begin_with_each_arm_equally_often() -> None:
    """A B A B has every A before its B, and any drift, or warmth that A leaves to B, in the difference."""
    runs = in_turns(*FASTER)
    abab = arms_of(
        *(
            [msgspec.structs.replace(e, origin=at(2 * e.round + n)) for e in arm]
            for n, arm in enumerate((runs.a, runs.b))
        )
    )
    assert claimed(runs).says == "different"
    claim = claimed(abab)
    assert claim.says == "refused" and "Arm A ran before arm B in 6 of 6 rounds" in claim.paragraph


def test_runs_of_one_round_that_are_far_apart_are_told() -> None:
    arms = in_turns(*FASTER)
    hours = [*arms.b[:5], msgspec.structs.replace(arms.b[5], origin=at(-300))]
    told = {item.rule: item.why for item in claimed(arms_of(arms.a, hours)).verdicts}
    assert "round 5: 18," in told["rounds at a stretch"]
    assert "rounds at a stretch" not in {item.rule for item in claimed(arms).verdicts}


ONE_EACH: list[list[str | None]] = [["x since 1"] * 6, ["y since 2"] * 6]
A_RUN: list[list[str | None]] = [[f"{name} since {n}" for n in range(6)] for name in "xy"]
SHARED: list[list[str | None]] = [["x since 1"] * 3 + ["x since 2"] * 3] * 2


@pytest.mark.parametrize(
    ("jobs", "says"), [(ONE_EACH, "refused"), (A_RUN, "different"), (SHARED, "different")]
)
def test_one_server_process_an_arm_is_one_run(jobs: list[list[str | None]], says: str) -> None:
    claim = claimed(of_jobs(*jobs))
    assert claim.says == says
    if says == "refused":
        assert "6 runs of arm A came from 1 server process(es) that arm B did not use" in claim.paragraph


@pytest.mark.parametrize("job", [None, "http://localhost:8000"])
def test_a_server_that_does_not_tell_its_start(job: str | None) -> None:
    served = {"subject": {"url": "http://localhost:8000"}}
    claim = claimed(of_jobs([job] * 6, [job] * 6, **served))
    assert claim.says == "refused" and "Which process served arm A is not known" in claim.paragraph
    telling = claimed(of_jobs(*A_RUN, **served))
    assert telling.says == "different"
    assert "measured from node7 (H200, driver 580.1) with the server at localhost" in telling.paragraph


def test_servers_on_different_hosts() -> None:
    def at_host(runs: tuple[Entry, ...], url: str | list[str], name: str) -> list[Entry]:
        return [msgspec.structs.replace(e, subject={"url": url}, job=f"{name} since {e.round}") for e in runs]

    arms = in_turns(*FASTER)
    far = claimed(arms_of(at_host(arms.a, "http://n1:8000", "x"), at_host(arms.b, ["http://n2:8000"], "y")))
    assert far.says == "refused" and "The servers are on different hosts: A n1; B n2" in far.paragraph
    near = claimed(
        arms_of(at_host(arms.a, "http://localhost:1", "x"), at_host(arms.b, "http://127.0.0.1:2", "y"))
    )
    assert near.says == "different"


def test_an_arm_is_one_subject() -> None:
    arms = in_turns(*FASTER)
    mixed = [msgspec.structs.replace(e, subject={"build": "B", "flags": e.round}) for e in arms.b]
    claim = claimed(arms_of(arms.a, mixed))
    assert claim.says == "refused" and "Arm B has 6 subjects, which differ in flags" in claim.paragraph


@pytest.mark.parametrize("changed", [{"subject": {"build": "C"}}, {"origin": at(0, commit="fedcba987654")}])
def test_a_control_of_another_build(changed: dict[str, object]) -> None:
    arms = in_turns(*FASTER, FASTER[0])
    other = [
        msgspec.structs.replace(
            e,
            **(
                changed
                if "origin" not in changed
                else {"origin": msgspec.structs.replace(e.origin, commit="fedcba987654")}
            ),
        )
        for e in arms.control
    ]
    assert claimed(arms).says == "different"
    claim = claimed(arms_of(arms.a, arms.b, other))
    assert claim.says == "refused" and {item.rule for item in claim.refusals} == {"control of A"}
