"""What is compared: a metric by name, and which statistic of its samples is a run's value.

Takes names and ledger entries. Knows no arm and no test.
"""

import re
from collections.abc import Iterable
from typing import Literal

import msgspec
import numpy as np

from flashstep.bench.ledger import Entry
from flashstep.bench.metrics import METRICS

# of a run, and still of its requests: 1 / percentile of the ITL (E18), so that only common ones count (E21)
INTERACTIVITY = {"p90_interactivity_tps": 90, "median_interactivity_tps": 50}
COLUMNS = dict.fromkeys(INTERACTIVITY, "itl_ms") | {"accuracy": "right"}  # where samples have another name
DEFAULT = {
    "request": "mean",
    "step": "median",
    "question": "mean",
    "run": "mean",
}  # a probe: its median step (E11)


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """``metric`` is a name of ``METRICS``; ``statistic`` is "mean", "median" or "p90"."""

    metric: str
    statistic: str

    @property
    def column(self) -> str:
        """Of the samples; "" where only the run as a whole has a value."""
        own = "" if METRICS[self.metric].of == "run" else self.metric
        return COLUMNS.get(self.metric, own)

    @property
    def unit(self) -> str:
        return METRICS[self.metric].unit

    @property
    def better(self) -> Literal["lower", "higher"]:
        return METRICS[self.metric].better

    @property
    def is_accuracy(self) -> bool:
        return METRICS[self.metric].of == "question"

    @property
    def is_of_steps(self) -> bool:
        return METRICS[self.metric].of == "step"

    @property
    def words(self) -> str:
        of = METRICS[self.metric].of
        return (
            METRICS[self.metric].words
            if of in ("run", "question")
            else f"{self.statistic} {METRICS[self.metric].words}"
        )

    @property
    def percentile(self) -> float | None:
        """Which one of its samples a run's value is, where it is one of the tail."""
        if self.metric in INTERACTIVITY:
            return float(INTERACTIVITY[self.metric])
        return float(self.statistic[1:]) if self.statistic.startswith("p") else None

    def beyond(self, count: int) -> str | None:
        """A sentence where not one of ``count`` samples lies beyond the percentile."""
        if self.percentile is None or count * (1 - self.percentile / 100) >= 1:
            return None
        return f"a run has {count} samples, and none of them lies beyond P{self.percentile:g}: it is little more than the largest"

    def of(self, values: np.ndarray) -> float:
        """A run's value."""
        if self.metric in INTERACTIVITY:
            itl = float(np.percentile(values, INTERACTIVITY[self.metric]))
            if not itl:
                raise ValueError(
                    f"{self.metric}: the inter-token latency is 0 ms; is a token counted without its time?"
                )
            return 1000 / itl
        if self.statistic == "mean":
            return float(np.mean(values))
        share = 50.0 if self.statistic == "median" else float(self.statistic[1:])
        return float(np.percentile(values, share))


def measure(text: str) -> Measure:
    """Of ``NAME`` or ``NAME:STATISTIC`` (mean, median, p90); ``ValueError`` names what there is."""
    name, _, statistic = text.partition(":")
    if name not in METRICS:
        raise ValueError(f"there is no metric {name!r}; there are {', '.join(sorted(METRICS))}")
    of = METRICS[name].of
    if statistic and of in ("run", "question"):
        raise ValueError(f"{text}: {name} is one value of a {of} and has no {statistic}; leave it out")
    if statistic and not re.fullmatch(r"mean|median|p(?!0+$)\d{1,2}(\.\d+)?", statistic):
        raise ValueError(
            f"{text}: the statistic is {statistic!r}; it must be mean, median, or p with a percentage, as p90"
        )
    return Measure(metric=name, statistic=statistic or DEFAULT[of])


def has(entry: Entry, asked: Measure) -> bool:
    """Whether ``entry`` has a value of it, of its samples or as a whole; another statistic than the usual needs samples."""
    usual = asked.statistic == DEFAULT[METRICS[asked.metric].of]
    return bool(entry.samples.column(asked.column)) or (usual and asked.metric in entry.metrics)


def shared_measures(entries: Iterable[Entry]) -> list[Measure]:
    """All metrics that every one of ``entries`` has, each by its usual statistic."""
    entries = list(entries)
    known = [Measure(metric=name, statistic=DEFAULT[METRICS[name].of]) for name in METRICS]
    return [asked for asked in known if entries and all(has(entry, asked) for entry in entries)]
