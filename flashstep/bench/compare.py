"""Two arms held against each other: which samples are scored, each run's value, and every test of spec/serving.md E.9.

Takes ledger entries; gives ``Compared``. It judges nothing: whether a design supports a claim is ``bench.verdicts``' question,
and what may be said is ``bench.claim``'s.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Literal

import msgspec
import numpy as np

from flashstep.bench.arms import without_copies
from flashstep.bench.ledger import Entry
from flashstep.bench.measure import Measure, has
from flashstep.bench.metrics import METRICS
from flashstep.bench.stats import bootstrap
from flashstep.bench.stats.paired import (
    Exchanged,
    Interval,
    Mean,
    Summary,
    Tested,
    Welch,
    exchange,
    mcnemar,
    mean_difference,
    sign_flip,
    summary,
    welch,
)


class Scoring(msgspec.Struct, frozen=True, kw_only=True):
    """Only samples that succeeded in both arms are scored (E21): how many are, and what each arm had besides.

    Numbers are sums over the runs. ``without`` had no value; ``dropped`` had one, and the other arm's run had none. ``fewest`` is
    how many a run has at least.
    """

    unit: str
    scored: int
    dropped_a: int
    dropped_b: int
    without_a: int
    without_b: int
    fewest: int


class Discordant(msgspec.Struct, frozen=True, kw_only=True):
    """McNemar of one run of each arm."""

    run_a: str
    run_b: str
    only_a: int
    only_b: int
    tested: Tested


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy, question by question: the mean of d = (share of B's runs that are right) - (A's), E25; sign-flip over d, E26."""

    count: int
    differing: int
    mean: Mean
    sign_flip: Tested
    mcnemar: tuple[Discordant, ...]


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """All about one metric. Differences are B - A; ``percent`` is of A's mean.

    ``rounds`` are those of paired runs, in which ``a[i]`` and ``b[i]`` ran side by side; empty: the runs are not paired.
    ``exchanged`` is the exact test (within rounds if paired, else within jobs), ``bootstrap`` intervals are told beside it.
    ``of_all_steps``: each run's value is of all steps that it had, and none is dropped.
    """

    measure: Measure
    a: tuple[float, ...]
    b: tuple[float, ...]
    rounds: tuple[int, ...]
    exchanged: Exchanged
    welch: Welch | None
    bootstrap: tuple[Interval, ...]
    scoring: Scoring | None
    questions: Questions | None
    of_all_steps: bool = False

    @property
    def differences(self) -> tuple[float, ...]:
        """Round by round; empty where runs are not paired."""
        return tuple(b - a for a, b in zip(self.a, self.b, strict=True)) if self.rounds else ()

    @property
    def words(self) -> str:
        """Of the measure; where a run kept no samples of it, its own figure was taken."""
        kind = METRICS[self.measure.metric]
        if self.scoring is None and not self.of_all_steps and kind.of != "run":
            return f"{kind.words} (each run's own figure)"
        return self.measure.words

    @property
    def difference(self) -> float:
        return self.questions.mean.mean if self.questions else self.exchanged.difference

    @property
    def interval(self) -> Interval:
        """The one that a claim gives: over questions for accuracy, else the exact test's own."""
        return self.questions.mean.interval if self.questions else self.exchanged.interval

    @property
    def bounds(self) -> tuple[Interval, ...]:
        """All that a margin must lie beyond: of accuracy over questions and over runs, which err for other reasons."""
        over_runs = self.welch.interval if self.questions and self.welch else None
        return (self.interval, over_runs) if over_runs else (self.interval,)

    @property
    def p(self) -> float:
        """What a claim stands on: for accuracy both the questions and the runs must tell the arms apart."""
        if self.questions is None:
            return self.exchanged.tested.p
        return max(self.questions.sign_flip.p, self.exchanged.tested.p)

    @property
    def percent(self) -> float | None:
        mean = float(np.mean(self.a))
        return 100 * self.difference / abs(mean) if mean else None

    @property
    def favours(self) -> Literal["A", "B"]:
        return "B" if (self.difference > 0) == (self.measure.better == "higher") else "A"

    @property
    def summaries(self) -> tuple[Summary, Summary] | None:
        return (summary(self.a), summary(self.b)) if min(len(self.a), len(self.b)) > 1 else None


def rounds_in_common(a: Sequence[Entry], b: Sequence[Entry]) -> list[int]:
    """The rounds that both arms ran, once each. Empty where a round stands twice: such runs are not paired."""
    ours, theirs = Counter(entry.round for entry in a), Counter(entry.round for entry in b)
    if any(count > 1 for count in chain(ours.values(), theirs.values())):
        return []
    common = sorted(ours.keys() & theirs.keys())
    return common if len(common) > 1 else []


def compare(
    a: Sequence[Entry],
    b: Sequence[Entry],
    asked: Measure,
    *,
    alpha: float = 0.05,
    resamples: int = bootstrap.RESAMPLES_OF_TWO,
    seed: int = 0,
) -> Compared:
    """Hold ``b`` against ``a``. ``resamples`` of the hierarchical bootstrap; 0 leaves all bootstraps out.

    ``ValueError`` where a run has no such metric, or no sample is common to the runs that stand against each other.
    """
    lacking = [entry.id for entry in chain(a, b) if not has(entry, asked)]
    if lacking or not a or not b:
        raise ValueError(f"{asked.metric} is not in {', '.join(lacking) or 'an arm without runs'}")
    if asked.is_accuracy and all(entry.samples.column(asked.column) for entry in chain(a, b)):
        a, b = without_copies(a), without_copies(b)
        return _accuracy(a, b, asked, alpha=alpha, resamples=resamples, seed=seed)
    rounds = rounds_in_common(a, b)
    if rounds:
        a, b = ([next(e for e in arm if e.round == r) for r in rounds] for arm in (a, b))
    groups = [([one], [other]) for one, other in zip(a, b, strict=True)] if rounds else [(list(a), list(b))]
    scored = None if asked.is_of_steps else _scored(groups, asked)
    values_a, values_b = _values(a, asked, scored, 0), _values(b, asked, scored, 1)
    exchanged = (
        exchange(values_a, values_b, rounds, rounds, confidence=1 - alpha, seed=seed)
        if rounds
        else _within_jobs(a, b, values_a, values_b, alpha=alpha, seed=seed)
    )
    return Compared(
        measure=asked,
        a=tuple(values_a),
        b=tuple(values_b),
        rounds=tuple(rounds),
        exchanged=exchanged,
        welch=_welch(values_a, values_b, alpha),
        bootstrap=_bootstraps(
            values_a,
            values_b,
            rounds,
            scored,
            asked,
            alpha=alpha,
            resamples=resamples,
            seed=seed,
        ),
        scoring=scored.scoring if scored else None,
        of_all_steps=asked.is_of_steps and all(entry.samples.column(asked.column) for entry in chain(a, b)),
        questions=None,
    )


class _Scored(msgspec.Struct, frozen=True, kw_only=True):
    """Arrays of the scored samples of each run, arm by arm; ``shared``: all groups have the same samples, of one seed."""

    scoring: Scoring
    arrays: tuple[list[np.ndarray], list[np.ndarray]]
    shared: bool


def _scored(groups: Sequence[tuple[Sequence[Entry], Sequence[Entry]]], asked: Measure) -> _Scored | None:
    """Of runs that stand against each other, group by group: the samples that all of a group have. None: the metric has none."""
    arrays: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    keys, dropped, without = [], [0, 0], [0, 0]
    for group in groups:
        columns = [[entry.samples.column(asked.column) for entry in arm] for arm in group]
        if not all(chain(*columns)):
            return None
        first, rest = columns[0][0], list(chain(*columns))[1:]
        common = [key for key in first if all(key in other for other in rest)]
        if not common:
            raise ValueError(
                f"no {group[0][0].samples.unit} has {asked.column} in both arms, so that nothing can be held against each other"
            )
        keys.append(tuple(common))
        for place, arm in enumerate(columns):
            arrays[place].extend(np.array([column[key] for key in common], float) for column in arm)
            dropped[place] += sum(len(column) - len(common) for column in arm)
            without[place] += sum(
                len(entry.samples.keys) - len(column) for entry, column in zip(group[place], arm, strict=True)
            )
    scoring = Scoring(
        unit=groups[0][0][0].samples.unit,
        scored=sum(map(len, arrays[0])),
        dropped_a=dropped[0],
        dropped_b=dropped[1],
        without_a=without[0],
        without_b=without[1],
        fewest=min(map(len, chain(*arrays))),
    )
    seeds = {entry.seed for arm in chain(*groups) for entry in arm}
    return _Scored(scoring=scoring, arrays=arrays, shared=len(set(keys)) == 1 and len(seeds) == 1)


def _values(entries: Sequence[Entry], asked: Measure, scored: _Scored | None, place: int) -> list[float]:
    if scored is None:
        return [_own(entry, asked) for entry in entries]
    return [asked.of(array) for array in scored.arrays[place]]


def _own(entry: Entry, asked: Measure) -> float:
    """Of all its steps, which are no other run's steps (E11: a run has as many as its drafts leave); else what it says itself."""
    steps = entry.samples.column(asked.column) if asked.is_of_steps else {}
    return asked.of(np.array(list(steps.values()), float)) if steps else entry.metrics[asked.metric]


def _within_jobs(
    a: Sequence[Entry],
    b: Sequence[Entry],
    values_a: list[float],
    values_b: list[float],
    *,
    alpha: float,
    seed: int,
) -> Exchanged:
    """Runs of their own jobs (None) are one block; jobs that only one arm has leave nothing to exchange, and count as own."""
    shared = {entry.job for entry in a} & {entry.job for entry in b}
    blocks = [[entry.job if entry.job in shared else None for entry in arm] for arm in (a, b)]
    return exchange(values_a, values_b, *blocks, confidence=1 - alpha, seed=seed)


def _welch(values_a: Sequence[float], values_b: Sequence[float], alpha: float) -> Welch | None:
    if min(len(values_a), len(values_b)) < 2:
        return None
    return welch(summary(values_a), summary(values_b), confidence=1 - alpha)


def _bootstraps(
    values_a: list[float],
    values_b: list[float],
    rounds: Sequence[int],
    scored: _Scored | None,
    asked: Measure,
    *,
    alpha: float,
    resamples: int,
    seed: int,
) -> tuple[Interval, ...]:
    if not resamples:
        return ()
    if not rounds:
        found = [bootstrap.of_runs(values_a, values_b, confidence=1 - alpha, seed=seed)]
    else:
        differences = np.subtract(values_b, values_a)
        found = [bootstrap.of_differences(differences, confidence=1 - alpha, seed=seed)]
        if scored is not None:
            found.append(
                bootstrap.of_rounds_and_samples(
                    *scored.arrays,
                    asked.of,
                    unit=scored.scoring.unit,
                    shared=scored.shared,
                    confidence=1 - alpha,
                    resamples=resamples,
                    seed=seed,
                )
            )
    return tuple(item for item in found if item is not None)


def _accuracy(
    a: Sequence[Entry], b: Sequence[Entry], asked: Measure, *, alpha: float, resamples: int, seed: int
) -> Compared:
    """Questions are the samples: common to all runs of both arms (E24 to E27)."""
    scored = _scored([(a, b)], asked)
    assert scored is not None
    right_a, right_b = (np.array(arrays) for arrays in scored.arrays)
    # whole numbers where answers are right or wrong: the sign-flip is then exact
    weighted = len(a) * right_b.sum(0) - len(b) * right_a.sum(0)
    differences = weighted / (len(a) * len(b))
    if len(differences) < 2:
        raise ValueError("one question is common to the arms; a comparison of accuracy needs two at least")
    values_a, values_b = (right.mean(1).tolist() for right in (right_a, right_b))
    interval = (
        bootstrap.of_differences(differences, unit="question", confidence=1 - alpha, seed=seed)
        if resamples
        else None
    )
    return Compared(
        measure=asked,
        a=tuple(values_a),
        b=tuple(values_b),
        rounds=(),
        exchanged=_within_jobs(a, b, values_a, values_b, alpha=alpha, seed=seed),
        welch=_welch(values_a, values_b, alpha),
        bootstrap=(interval,) if interval else (),
        scoring=scored.scoring,
        questions=Questions(
            count=len(differences),
            differing=int(np.count_nonzero(weighted)),
            mean=mean_difference(differences, confidence=1 - alpha),
            sign_flip=sign_flip(weighted, seed=seed),
            mcnemar=_discordant(a, b, right_a, right_b),
        ),
    )


def _discordant(
    a: Sequence[Entry], b: Sequence[Entry], right_a: np.ndarray, right_b: np.ndarray
) -> tuple[Discordant, ...]:
    """Run by run in order of rounds, as far as both arms have one, where each answer is right or wrong."""
    if not set(np.unique(right_a)) | set(np.unique(right_b)) <= {0.0, 1.0}:
        return ()
    orders = [sorted(range(len(arm)), key=lambda place, arm=arm: arm[place].round) for arm in (a, b)]
    found = []
    for one, other in zip(*orders, strict=False):
        only_a = int(((right_a[one] == 1) & (right_b[other] == 0)).sum())
        only_b = int(((right_a[one] == 0) & (right_b[other] == 1)).sum())
        found.append(
            Discordant(
                run_a=a[one].id,
                run_b=b[other].id,
                only_a=only_a,
                only_b=only_b,
                tested=mcnemar(only_a, only_b),
            )
        )
    return tuple(found)
