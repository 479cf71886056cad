"""When the arms ran, and in which processes: what else than the build could have made the difference."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from statistics import median

from flashstep.bench.arms import Arms
from flashstep.bench.compare import rounds_in_common
from flashstep.bench.ledger import Entry
from flashstep.bench.measure import Measure
from flashstep.bench.stats.design import separation
from flashstep.bench.verdicts.verdict import Verdict, some

# A B A B has it: a drift weighs half as much as if all A had run before all B
MOST_SEPARATED = 0.5
FAR = 3  # times the usual pause from run to run
IN_TURNS = "run the arms in turns (A B B A), so that a drift of the machine is not taken for a difference"
BEGUN = " since "  # within a job: when the server's process began (bench.load.target)


def of_order(arms: Arms, asked: Measure) -> Iterator[Verdict]:
    """A drift, or what a run leaves to the next, must weigh the same on both arms; accuracy is only told of it."""
    stops = "nothing" if asked.is_accuracy else "claim"
    for label, runs in arms.named.items():
        if label == "A":
            continue
        rounds = rounds_in_common(arms.a, runs)
        if rounds:
            began = [{e.round: e.origin.date for e in arm} for arm in (arms.a, runs)]
            first = sum(began[0][r] < began[1][r] for r in rounds)
            if 2 * first != len(rounds):
                yield Verdict(
                    rule="runs in turns",
                    stops=stops,
                    why=f"arm A ran before arm {label} in {first} of {len(rounds)} rounds; each must run first equally often",
                    remedy=IN_TURNS,
                )
        else:
            yield from _of_separation(arms.a, runs, label, asked)
    yield from _of_pauses(arms)


def _of_separation(
    a: Sequence[Entry], other: Sequence[Entry], label: str, asked: Measure
) -> Iterator[Verdict]:
    """Of runs that are no pairs. A stable sort: runs of the same second keep the order of their ledger."""
    placed = [(e.origin.date, "A") for e in a] + [(e.origin.date, label) for e in other]
    apart = separation([name for _, name in sorted(placed, key=lambda item: item[0])], "A", label)
    if not apart or min(len(a), len(other)) < 2:
        return
    first, second = ("A", label) if apart > 0 else (label, "A")
    yield Verdict(
        rule="runs in turns",
        stops="claim" if abs(apart) >= MOST_SEPARATED and not asked.is_accuracy else "nothing",
        why=f"all runs of arm {first} came before all of arm {second}"
        if abs(apart) == 1
        else f"arm {first} ran mostly before arm {second} ({100 * (1 + abs(apart)) / 2:.0f}% of the pairs of runs)",
        remedy=IN_TURNS,
    )


def _of_pauses(arms: Arms) -> Iterator[Verdict]:
    began = sorted(_began(e) for e in arms.all)
    usual = median(after - before for before, after in pairwise(began)) if len(began) > 1 else 0.0
    times: dict[int, list[float]] = {}
    for entry in arms.all:
        times.setdefault(entry.round, []).append(_began(entry))
    far = [
        f"round {r}: {max(found) - min(found):,.0f} s"
        for r, found in sorted(times.items())
        if len(found) == len(arms.named) and max(found) - min(found) > FAR * (len(found) - 1) * usual
    ]
    if far:
        yield Verdict(
            rule="rounds at a stretch",
            stops="nothing",
            why=f"runs of one round began far apart ({some(far)}; from run to run it is usually {usual:,.0f} s), so that "
            "they may have less in common than a pair should",
        )


def _began(entry: Entry) -> float:
    return datetime.fromisoformat(entry.origin.date).timestamp()


def of_processes(arms: Arms, asked: Measure) -> Iterator[Verdict]:
    """What differs from one start of a server to the next is no difference of builds, and one process an arm cannot tell them
    apart."""
    for label, runs in arms.named.items():
        unknown = [e for e in runs if "url" in e.subject and BEGUN not in (e.job or "")]
        if unknown:
            yield Verdict(
                rule="known processes",
                stops="nothing" if asked.is_accuracy else "claim",
                why=f"which process served arm {label} is not known: its server does not tell when it began "
                f"(process_start_time_seconds in /metrics), so that all {len(runs)} runs may be of one start",
                remedy="measure a server that tells, started anew for each run",
            )
    for label, runs in arms.named.items():
        if label == "A":
            continue
        shared = {e.job for e in arms.a} & {e.job for e in runs}
        for name, arm in (("A", arms.a), (label, runs)):
            own = [e.job for e in arm if e.job is not None and e.job not in shared]
            if len(set(own)) < len(own):
                yield Verdict(
                    rule="a process a run",
                    stops="difference" if asked.is_accuracy else "claim",
                    why=f"{len(own)} runs of arm {name} came from {len(set(own))} server process(es) that arm "
                    f"{label if name == 'A' else 'A'} did not use: what differs from start to start is not told from what "
                    "differs between builds",
                    remedy="start the server anew for each run (an arm's command may be a script that does)",
                )
