"""What was asked of both arms: kind, settings, seeds, what makes texts wrong on purpose."""

from collections import Counter
from collections.abc import Iterator

from flashstep.bench.arms import Arms
from flashstep.bench.compare import rounds_in_common
from flashstep.bench.ledger import unequal
from flashstep.bench.measure import Measure
from flashstep.bench.verdicts.verdict import Verdict, by_arm, differ, distinct, listed, some

UNFALSIFIED = {  # how to run without what makes texts wrong on purpose
    "synthetic acceptance": "with rejection_sample_method block or standard",
    "uniform routing": "with --routing real",
    "recorded routing": "with --routing real",
    "filled cache": "without --fill-cache",
}


def of_settings(arms: Arms, asked: Measure) -> Iterator[Verdict]:
    """Kind, settings, seeds, what makes texts wrong on purpose."""
    kinds = by_arm(arms, lambda entry: entry.kind)
    if differ(kinds):
        yield Verdict(
            rule="one kind",
            stops="claim",
            why=f"the runs are of different kinds: {listed(kinds)}",
            remedy="compare two runs of the same command",
        )
    for name, values in unequal(arms.all).items():
        yield Verdict(
            rule="equal settings",
            stops="claim",
            why=f"{name} is not the same in all runs: {some(values)}",
            remedy=f"run both arms with the same {name}; only the subject may differ",
        )
    yield from _of_seeds(arms)
    yield from _of_falsified(arms, asked)


def _of_seeds(arms: Arms) -> Iterator[Verdict]:
    for label, runs in arms.named.items():
        if label == "A":
            continue
        rounds = rounds_in_common(arms.a, runs)
        if rounds:
            seeds = [{e.round: e.seed for e in arm} for arm in (arms.a, runs)]
            other = [r for r in rounds if seeds[0][r] != seeds[1][r]]
        else:
            counts = [Counter(e.seed for e in arm) for arm in (arms.a, runs)]
            sets = counts if len(arms.a) == len(runs) else [set(count) for count in counts]
            other = [] if sets[0] == sets[1] else ["any"]
        if other:
            where = f" in round {some(other)}" if rounds else ""
            yield Verdict(
                rule="equal seeds",
                stops="claim",
                why=f"the seeds of arms A and {label} are not the same{where}",
                remedy="give both arms of a round the same --seed",
            )


def _of_falsified(arms: Arms, asked: Measure) -> Iterator[Verdict]:
    """What makes texts wrong on purpose (``Entry.falsified_by``) spoils accuracy; for speed all runs must have the same."""
    runs = [set(entry.falsified_by) for entry in arms.all]
    words = distinct(word for entry in arms.all for word in entry.falsified_by)
    for word in words:
        kind, without = word.rsplit(" ", 1)[-1], UNFALSIFIED.get(word, f"without {word}")
        if asked.is_accuracy:
            yield Verdict(
                rule=f"real {kind}",
                stops="claim",
                why=f"some runs have {word}, so that their answers are not the model's (E30)",
                remedy=f"run accuracy {without}",
            )
        elif not all(word in run for run in runs):
            yield Verdict(
                rule=f"equal {kind}",
                stops="claim",
                why=f"some runs have {word} and others have not",
                remedy=f"run all of them {without}, or none",
            )
        else:
            yield Verdict(
                rule=kind,
                stops="nothing",
                why=f"all runs have {word}: times are real, texts are not (E9, E30)",
            )
