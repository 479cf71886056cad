"""The runs themselves: how many there are, whether each is its own, whether it ended, what failed in it."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from flashstep.bench.arms import Arms, without_copies
from flashstep.bench.ledger import Entry
from flashstep.bench.measure import Measure, has
from flashstep.bench.metrics import MOST_FAILED
from flashstep.bench.stats.paired import unequal_shares
from flashstep.bench.verdicts.verdict import SHOWN, Verdict, distinct, some

MORE_OFTEN = "run each arm more often, in turns (E23): flashstep bench compare A B --rounds N"
UNLIKELY = 0.05  # that failures would be as unequal as this by chance


def of_runs(arms: Arms, asked: Measure) -> Iterator[Verdict]:
    """All of it."""
    twice = [name for name, count in Counter(e.id for e in arms.all).items() if count > 1]
    if twice:
        yield Verdict(
            rule="own runs",
            stops="claim",
            why=f"{len(twice)} entries stand in the arms more than once ({some(twice)})",
            remedy="give each arm its own runs",
        )
    for label, runs in arms.named.items():
        yield from _of_arm(label, runs, asked)
    if arms.replaced:
        yield Verdict(
            rule="replaced runs",
            stops="nothing",
            why=f"{len(arms.replaced)} run(s) ended early and were run again ({some(begun_again(arms))}); these are not counted",
        )
    yield from _of_failures(arms)


def begun_again(arms: Arms) -> list[str]:
    """Arm and round of runs that ended early and were run again, each with how often, where that is more than once."""
    counts = Counter(f"{e.label or 'unnamed'} {e.round}" for e in arms.replaced)
    return [place if count == 1 else f"{place} {count} times" for place, count in counts.items()]


def _of_arm(label: str, runs: tuple[Entry, ...], asked: Measure) -> Iterator[Verdict]:
    if len(runs) < 2:
        yield Verdict(
            rule="two runs an arm",
            stops="claim",
            why=f"arm {label} has {len(runs)} run{'' if len(runs) == 1 else 's'}, and its noise from run to run is not known",
            remedy=MORE_OFTEN,
        )
    lost = [e for e in runs if not e.complete]
    if lost:
        faults = "; ".join(distinct(chain(*(e.faults for e in lost)))[:SHOWN])
        yield Verdict(
            rule="complete runs",
            stops="claim",
            why=f"arm {label} has {len(lost)} run(s) that ended before their plan"
            + (f" (round {some([e.round for e in lost])}): {faults}" if faults else ""),
            remedy="run them again; the same compare command goes on where it stopped",
        )
    faulty = [e for e in runs if e.complete and e.faults]
    if faulty:
        told = some(distinct(chain(*(e.faults for e in faulty))))
        yield Verdict(rule="faults", stops="nothing", why=f"{len(faulty)} run(s) of arm {label} say: {told}")
    lacking = [e.id for e in runs if not has(e, asked)]
    if lacking:
        yield Verdict(
            rule="metric",
            stops="claim",
            why=f"{len(lacking)} run(s) of arm {label} have no {asked.metric} ({some(lacking)})",
            remedy="name a metric that all runs have with --metric",
        )
    own = without_copies(runs) if asked.is_accuracy else runs
    if len(own) < len(runs):
        yield Verdict(
            rule="copies",
            stops="claim" if len(own) < 2 else "nothing",
            why=f"{len(runs) - len(own)} run(s) of arm {label} gave the same answers as an earlier one, and do not count as runs",
            remedy="sample with a temperature above 0, so that runs differ",
        )


def failed_and_asked(runs: tuple[Entry, ...]) -> tuple[int, int]:
    failed = sum(e.failed for e in runs)
    return failed, failed + sum(len(e.samples.keys) for e in runs)


def _of_failures(arms: Arms) -> Iterator[Verdict]:
    """Requests that fail are seldom the fast ones, so that what is left flatters an arm that fails more."""
    for label, runs in arms.named.items():
        shares = {e.round: e.failed / (e.failed + len(e.samples.keys)) for e in runs if e.failed}
        over = [f"round {r}: {100 * share:.0f}%" for r, share in shares.items() if share > MOST_FAILED]
        if over:
            yield Verdict(
                rule="few failures",
                stops="claim",
                why=f"over {100 * MOST_FAILED:.0f}% of arm {label}'s requests failed ({some(over)}), and the others say too "
                "little (H4)",
                remedy="find out why they fail, and begin another ledger",
            )
    for label, runs in arms.named.items():
        ours, theirs = failed_and_asked(arms.a), failed_and_asked(runs)
        if label != "A" and ours[0] + theirs[0] and unequal_shares(ours, theirs) <= UNLIKELY:
            yield Verdict(
                rule="equal failures",
                stops="claim",
                why=f"{ours[0]:,} of {ours[1]:,} of A and {theirs[0]:,} of {theirs[1]:,} of {label} failed, which is more "
                "unequal than chance makes it, and what did not fail is then no fair sample",
                remedy="find out why they fail, and begin another ledger",
            )
