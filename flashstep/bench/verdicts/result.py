"""What was compared: whether the tests can reach the level, what the control shows, what was left out."""

from collections.abc import Iterator

from flashstep.bench.arms import Question
from flashstep.bench.compare import Compared
from flashstep.bench.stats.design import fewest_rounds, fewest_runs
from flashstep.bench.verdicts.verdict import Verdict


def of_result(
    question: Question, primary: Compared, control: Compared | None, beside: Compared | None
) -> Iterator[Verdict]:
    """``control`` is the control held against A, ``beside`` is B held against the control."""
    smallest = primary.exchanged.tested.smallest
    if smallest > question.alpha and min(len(primary.a), len(primary.b)) > 1:
        runs = (
            f"{fewest_rounds(question.alpha)} rounds"
            if primary.rounds
            else f"{fewest_runs(question.alpha)} runs of each arm in one job"
        )
        yield Verdict(
            rule="enough runs",
            stops="difference" if primary.questions else "claim",
            why=f"with {len(primary.a)} and {len(primary.b)} runs the smallest p there is is {smallest:.3g}, above the level "
            f"{question.alpha:g} (E27)",
            remedy=f"run {runs}",
        )
    if len(primary.a) > 1 and len(set(primary.differences or (*primary.a, *primary.b))) == 1:
        yield Verdict(
            rule="no spread",
            stops="nothing",
            why="every run says exactly the same, so that the interval is a point: this figure was counted rather than measured",
        )
    yield from _of_samples(primary)
    if control is None or beside is None:
        yield Verdict(
            rule="control",
            stops="nothing",
            why="no control arm shows how far this build differs from itself",
            remedy="add --control A",
        )
    else:
        yield from _of_control(question.alpha, primary, control, beside)


def _of_control(alpha: float, primary: Compared, control: Compared, beside: Compared) -> Iterator[Verdict]:
    """B must differ from both runs of A's build, the same way; and A's build from itself by less than B does."""
    if primary.p <= alpha and (beside.p > alpha or beside.favours != primary.favours):
        yield Verdict(
            rule="control",
            stops="difference",
            why=f"B differs from A (p = {primary.p:.2g}) and not in the same way from the control (p = {beside.p:.2g}), which is "
            "the same build",
            remedy="plan more rounds",
        )
    if control.p <= alpha:
        small = _reach(control)[1] < _reach(primary)[0]
        yield Verdict(
            rule="control",
            stops="nothing" if small else "claim",
            why=f"the build of A differs from itself (control: p = {control.p:.2g})"
            + (", by less than B does" if small else ", by as much as B may differ"),
            remedy="find what changes between runs of one build",
        )


def _reach(found: Compared) -> tuple[float, float]:
    """The least and the greatest distance from 0 within the interval."""
    low, high = found.interval.low, found.interval.high
    least = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    return least, max(abs(low), abs(high))


def _of_samples(primary: Compared) -> Iterator[Verdict]:
    found = primary.scoring
    if found is None:
        return
    if found.dropped_a or found.dropped_b:
        yield Verdict(
            rule="common samples",
            stops="nothing",
            why=f"{found.scored:,} {found.unit}s of each arm are scored, which both arms completed; {found.dropped_a:,} of A and "
            f"{found.dropped_b:,} of B are not (E21)",
        )
    if found.without_a or found.without_b:
        yield Verdict(
            rule="samples without a value",
            stops="nothing",
            why=f"{found.without_a:,} {found.unit}s of A and {found.without_b:,} of B have no {primary.measure.column}",
        )
    beyond = primary.measure.beyond(found.fewest)
    if beyond is not None:
        yield Verdict(
            rule="percentile",
            stops="nothing",
            why=beyond,
            remedy="measure more, or ask for a lower percentile",
        )
