"""The rules of a claim: what a design must have, each broken one as a ``Verdict`` with why and what to do.

Takes the arms' entries and what was compared; gives verdicts, never an exception. The claim's own words are ``bench.claim``'s.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import msgspec

from flashstep.bench.arms import Arms, Question
from flashstep.bench.compare import Compared, rounds_in_common
from flashstep.bench.experiment import CONTROL
from flashstep.bench.ledger import Entry, unequal
from flashstep.bench.measure import Measure, has
from flashstep.bench.origin import Origin
from flashstep.bench.stats.design import fewest_rounds, fewest_runs, separation

# A B A B has it; beyond, a drift weighs more than half as much as if all A had run before all B
MOST_SEPARATED = 0.5
SHOWN = 3  # of a list in a sentence


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One rule that the design breaks. ``stops`` is what cannot be claimed then; "nothing": it is only told."""

    rule: str
    stops: Literal["claim", "difference", "non-inferiority", "nothing"]
    why: str
    remedy: str = ""


def of_origin(arms: Arms) -> Iterator[Verdict]:
    """Machine, driver, GPUs; commits and changed files."""
    for name, words in (
        ("machine", "machines"),
        ("cpu", "processors"),
        ("driver", "drivers"),
        ("gpus", "GPUs"),
    ):
        found = {
            label: _distinct(_hardware(e.origin, name) for e in runs) for label, runs in arms.named.items()
        }
        if len(_distinct(chain(*found.values()))) > 1:
            yield Verdict(
                rule="one machine",
                stops="claim",
                why=f"the runs come from different {words}: {_listed(found)}",
                remedy="run both arms on one machine with nothing changed between them (E23)",
            )
    for name in ("python", "torch"):
        found = {
            label: _distinct(getattr(e.origin, name) for e in runs) for label, runs in arms.named.items()
        }
        if len(_distinct(chain(*found.values()))) > 1:
            yield Verdict(rule="libraries", stops="nothing", why=f"{name} is not the same: {_listed(found)}")
    revisions = {label: _distinct(e.origin.revision for e in runs) for label, runs in arms.named.items()}
    for label, found in revisions.items():
        if len(found) > 1:
            yield Verdict(
                rule="one build an arm",
                stops="claim",
                why=f"arm {label} has runs of different commits: {', '.join(map(str, found))}",
                remedy="run the whole arm from one commit",
            )
    yield from _of_revisions(arms, revisions)


def _of_revisions(arms: Arms, revisions: dict[str, list[Any]]) -> Iterator[Verdict]:
    told = set(chain(*revisions.values()))
    if any(str(name).endswith("+") for name in told):
        same = revisions["A"] == revisions["B"]
        yield Verdict(
            rule="changed files",
            stops="nothing",
            why=f"files differed from the commit ({_listed(revisions)})"
            + (
                "; both arms say the same commit, and what differs between them stands nowhere"
                if same
                else ""
            ),
            remedy="commit before measuring, so that others can build what was measured",
        )
    if "unknown" in told:
        yield Verdict(
            rule="unknown commit",
            stops="nothing",
            why="a run was made outside a repository, so that its commit is not known",
            remedy="say the build in the arm's subject",
        )
    subjects = {label: _distinct(dict(e.subject) for e in runs) for label, runs in arms.named.items()}
    if arms.control and (revisions[CONTROL], subjects[CONTROL]) != (revisions["A"], subjects["A"]):
        yield Verdict(
            rule="control of A",
            stops="nothing",
            why="commit or subject of the control are not A's, so that it is not the same build by the ledger's account",
        )
    if revisions["A"] == revisions["B"] and subjects["A"] == subjects["B"]:
        yield Verdict(
            rule="same subject",
            stops="nothing",
            why="both arms have the same commit and the same subject: as far as the ledger tells, this is a build against itself",
        )


def _hardware(origin: Origin, name: str) -> Any:
    if name == "gpus":  # name and uuid; clocks and temperature are of the moment
        return tuple(",".join(gpu.split(",")[:2]) for gpu in origin.gpus)
    return getattr(origin, name)


def of_settings(arms: Arms, question: Question) -> Iterator[Verdict]:
    """Kind, settings, seeds, acceptance, routing."""
    kinds = {label: _distinct(e.kind for e in runs) for label, runs in arms.named.items()}
    if len(_distinct(chain(*kinds.values()))) > 1:
        yield Verdict(
            rule="one kind",
            stops="claim",
            why=f"the runs are of different kinds: {_listed(kinds)}",
            remedy="compare two runs of the same command",
        )
    for name, values in unequal(arms.all).items():
        yield Verdict(
            rule="equal settings",
            stops="claim",
            why=f"{name} is not the same in all runs: {_some(values)}",
            remedy=f"run both arms with the same {name}; only the subject may differ",
        )
    yield from _of_seeds(arms)
    yield from _of_synthetic(arms, question.measure)
    yield from _of_routing(arms, question.measure)


def _of_seeds(arms: Arms) -> Iterator[Verdict]:
    for label, runs in arms.named.items():
        if label == "A":
            continue
        rounds = rounds_in_common(arms.a, runs)
        if rounds:
            seeds = [{e.round: e.seed for e in arm} for arm in (arms.a, runs)]
            differ = [r for r in rounds if seeds[0][r] != seeds[1][r]]
        else:
            counts = [Counter(e.seed for e in arm) for arm in (arms.a, runs)]
            sets = counts if len(arms.a) == len(runs) else [set(count) for count in counts]
            differ = [] if sets[0] == sets[1] else ["any"]
        if differ:
            where = f" in round {_some(differ)}" if rounds else ""
            yield Verdict(
                rule="equal seeds",
                stops="claim",
                why=f"the seeds of arms A and {label} are not the same{where}",
                remedy="give both arms of a round the same --seed",
            )


def _of_synthetic(arms: Arms, asked: Measure) -> Iterator[Verdict]:
    synthetic = {label: _distinct(e.synthetic_acceptance for e in runs) for label, runs in arms.named.items()}
    values = _distinct(chain(*synthetic.values()))
    if asked.is_accuracy and True in values:
        yield Verdict(
            rule="real acceptance",
            stops="claim",
            why="drafts stood by lot (synthetic acceptance), so that the answers are not the model's (E30)",
            remedy="run accuracy with rejection_sample_method block or standard",
        )
    elif len(values) > 1:
        yield Verdict(
            rule="equal acceptance",
            stops="claim",
            why="some runs have synthetic acceptance and others real",
            remedy="run both arms with the same rejection_sample_method",
        )
    elif True in values:
        yield Verdict(
            rule="acceptance",
            stops="nothing",
            why="acceptance is synthetic: times are real, texts are not (E30)",
        )


def _of_routing(arms: Arms, asked: Measure) -> Iterator[Verdict]:
    routings = _distinct(e.routing for e in arms.all)
    if asked.is_accuracy and routings != ["real"]:
        yield Verdict(
            rule="real routing",
            stops="claim",
            why=f"routing was {_some(routings)}, so that the answers are not the model's",
            remedy="run accuracy with --routing real",
        )
    elif len(routings) > 1:
        yield Verdict(
            rule="equal routing",
            stops="claim",
            why=f"the runs differ in routing: {_some(routings)}",
            remedy="run both arms with the same --routing",
        )
    elif routings and routings != ["real"]:
        yield Verdict(rule="routing", stops="nothing", why=f"routing is {routings[0]} (E9)")


def of_runs(arms: Arms, asked: Measure) -> Iterator[Verdict]:
    """How many there are, whether they ended, what went wrong, and in which order they ran."""
    for label, runs in arms.named.items():
        if len(runs) < 2:
            yield Verdict(
                rule="two runs an arm",
                stops="claim",
                why=f"arm {label} has {len(runs)} run{'' if len(runs) == 1 else 's'}, and its noise from run to run is not known",
                remedy="run each arm more often, in turns (E23): flashstep bench compare A B --rounds N",
            )
        lost = [e for e in runs if not e.complete]
        if lost:
            faults = "; ".join(_distinct(chain(*(e.faults for e in lost)))[:SHOWN])
            yield Verdict(
                rule="complete runs",
                stops="claim",
                why=f"arm {label} has {len(lost)} run(s) that ended before their plan"
                + (f" (round {_some([e.round for e in lost])}): {faults}" if faults else ""),
                remedy="run them again; the same compare command goes on where it stopped",
            )
        faulty = [e for e in runs if e.complete and e.faults]
        if faulty:
            told = _some(_distinct(chain(*(e.faults for e in faulty))))
            yield Verdict(
                rule="faults", stops="nothing", why=f"{len(faulty)} run(s) of arm {label} say: {told}"
            )
        lacking = [e.id for e in runs if not has(e, asked)]
        if lacking:
            yield Verdict(
                rule="metric",
                stops="claim",
                why=f"{len(lacking)} run(s) of arm {label} have no {asked.metric} ({_some(lacking)})",
                remedy="name a metric that all runs have with --metric",
            )
    if arms.replaced:
        rounds = [f"{e.label or 'unnamed'} {e.round}" for e in arms.replaced]
        yield Verdict(
            rule="replaced runs",
            stops="nothing",
            why=f"{len(rounds)} run(s) ended early and were run again ({_some(rounds)}); these are not counted",
        )
    yield from _of_order(arms, asked)


def _of_order(arms: Arms, asked: Measure) -> Iterator[Verdict]:
    """A stable sort: runs of the same second keep the order of their ledger."""
    placed = sorted(
        ((e.origin.date, label) for label, runs in arms.named.items() for e in runs), key=lambda item: item[0]
    )
    labels = [label for _, label in placed]
    for label in arms.named:
        if label == "A" or min(labels.count("A"), labels.count(label)) < 2:
            continue
        apart = separation(labels, "A", label)
        if not apart:
            continue
        first, second = ("A", label) if apart > 0 else (label, "A")
        stops = "claim" if abs(apart) > MOST_SEPARATED and not asked.is_accuracy else "nothing"
        yield Verdict(
            rule="runs in turns",
            stops=stops,
            why=f"all runs of arm {first} came before all of arm {second}"
            if abs(apart) == 1
            else f"arm {first} ran mostly before arm {second} ({100 * (1 + abs(apart)) / 2:.0f}% of the pairs of runs)",
            remedy="run the arms in turns (A B B A), so that a drift of the machine is not taken for a difference",
        )


def of_result(question: Question, primary: Compared, control: Compared | None) -> Iterator[Verdict]:
    """What the tests can reach, what the control shows, what was left out."""
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
    if primary.scoring is not None:
        yield from _of_scoring(primary)
    if control is None:
        yield Verdict(
            rule="control",
            stops="nothing",
            why="no control arm shows how far this build differs from itself",
            remedy="add --control A",
        )
    elif control.p <= question.alpha and control.exchanged.tested.smallest <= question.alpha:
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


def _of_scoring(primary: Compared) -> Iterator[Verdict]:
    found = primary.scoring
    assert found is not None
    if found.dropped_a or found.dropped_b:
        yield Verdict(
            rule="common samples",
            stops="nothing",
            why=f"{found.scored:,} {found.unit}s of each arm are scored, which both arms completed; {found.dropped_a:,} of A and "
            f"{found.dropped_b:,} of B are not (E21)",
        )
    if found.failed_a or found.failed_b:
        yield Verdict(
            rule="failed samples",
            stops="nothing",
            why=f"{found.failed_a:,} {found.unit}s of A and {found.failed_b:,} of B have no {primary.measure.column}",
        )


def of_plan(arms: Arms, question: Question) -> Iterator[Verdict]:
    """Whether what is claimed was decided before the runs."""
    carried = _distinct(e.plan for e in arms.all)
    if question.stated is None or carried != [question.stated.digest]:
        why = "no plan was written before the runs, so that metric and number of runs may have been chosen after them"
        if question.stated is not None:
            why = f"the runs do not carry the hash of {question.stated.file} ({_some([c and c[:12] for c in carried])})"
        elif carried != [None]:
            why = f"the runs carry the hash of a plan ({_some([c and c[:12] for c in carried])}) that was not found"
        remedy = "let flashstep bench compare run the arms, or give the plan's file with --plan"
        yield Verdict(rule="plan", stops="nothing", why=why, remedy=remedy)
        if question.margin is not None:
            yield Verdict(
                rule="margin beforehand",
                stops="non-inferiority",
                why="the margin was not stated before the runs (E28)",
                remedy="state it with --margin when the runs are planned",
            )
        return
    plan = question.stated.plan
    early = [e.id for e in arms.all if e.origin.date < plan.date]
    if early:
        yield Verdict(
            rule="plan before runs",
            stops="claim",
            why=f"{len(early)} run(s) are older than the plan of {plan.date} ({_some(early)})",
            remedy="begin another ledger",
        )
    for label, runs in arms.named.items():
        count = len({e.round for e in runs if e.complete})
        if count != plan.rounds:
            yield Verdict(
                rule="planned rounds",
                stops="claim",
                why=f"{plan.rounds} rounds were planned, and arm {label} has {count}: a claim that may be made as soon as it "
                "looks good is made too often",
                remedy="the same compare command goes on where it stopped",
            )
    counts = {f"{label} {r}": count for label, runs in arms.named.items() for r, count in _by_round(runs)}
    if len(set(counts.values())) > 1:
        usual = Counter(counts.values()).most_common(1)[0][0]
        odd = [f"{place} has {count}" for place, count in counts.items() if count != usual]
        yield Verdict(
            rule="equal rounds",
            stops="claim",
            why=f"most rounds kept {usual} run(s), and {_some(odd)}",
            remedy="begin another ledger",
        )


def _by_round(runs: Iterable[Entry]) -> list[tuple[int, int]]:
    return sorted(Counter(e.round for e in runs).items())


def _distinct(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _some(values: Sequence[Any]) -> str:
    shown = ", ".join(str(value) for value in values[:SHOWN])
    return shown + (f" and {len(values) - SHOWN} more" if len(values) > SHOWN else "")


def _listed(found: dict[str, list[Any]]) -> str:
    return "; ".join(f"{label} {_some(values)}" for label, values in found.items())
