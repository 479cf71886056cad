"""What a page says of entries: names of arms and their looks, groups that may stand in one picture, figures in words.

Takes ledger entries; gives strings and groups. Knows no HTML and no pictures.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from flashstep.bench.ledger import Entry
from flashstep.bench.metrics import METRICS
from flashstep.bench.report.charts import Look

MOST_GROUPS = 6  # pictures of one kind on a page
SWEPT = (
    "max_concurrency",
    "concurrency",
    "batch_size",
    "request_rate",
    "arrivals",
    "ranks",
)  # load, not workload


def arm(entry: Entry) -> str:
    """The arm's label; without one, what was measured."""
    if entry.label:
        return entry.label
    model = entry.subject.get("model")
    return str(model).rstrip("/").rsplit("/", 1)[-1] if model else "without a label"


def looks(entries: Sequence[Entry]) -> dict[str, Look]:
    """One for each arm, in the order in which they come."""
    names = dict.fromkeys(arm(entry) for entry in entries)
    return {name: Look(number) for number, name in enumerate(names)}


def doubts(entry: Entry) -> list[str]:
    """What a reader must know before believing a figure of this entry."""
    return [
        *([] if entry.complete else ["incomplete"]),
        *(["synthetic acceptance"] if entry.synthetic_acceptance else []),
        *([f"{entry.routing} routing"] if entry.routing != "real" else []),
        *(["uncommitted changes"] if entry.origin.dirty else []),
    ]


def grouped(entries: Sequence[Entry], *, swept: bool = False) -> dict[str, list[Entry]]:
    """Entries of the same kind and settings, by a name; ``swept``: those that differ in their load only are together."""
    groups: dict[bytes, list[Entry]] = {}
    for entry in entries:
        settings = {name: value for name, value in entry.settings.items() if not (swept and name in SWEPT)}
        key = msgspec.json.encode([entry.kind, settings], order="deterministic")
        groups.setdefault(key, []).append(entry)
    names = [workload(members[0], swept=swept) for members in groups.values()]
    return {
        name if names.count(name) == 1 else f"{name} ({number})": members
        for number, (name, members) in enumerate(zip(names, groups.values(), strict=True), 1)
    }


def workload(entry: Entry, *, swept: bool = False) -> str:
    """A few words on the settings of ``entry``: the first of its plain values that say something."""
    words = [
        f"{name.replace('_', ' ')} {shown(value)}"
        for name, value in entry.settings.items()
        if isinstance(value, (int, float, str))
        and value
        and not isinstance(value, bool)
        and not name.endswith("sha256")
        and not (swept and name in SWEPT)
    ]
    return f"{entry.kind}: {', '.join(words[:4])}" if words else entry.kind


def load(entry: Entry) -> str:
    """How much was asked at once, where the settings say it: the note at a point of a frontier."""
    for name in ("max_concurrency", "concurrency", "batch_size"):
        value = entry.settings.get(name)
        if isinstance(value, int):
            return str(value)
    return ""


def figures(entry: Entry) -> list[str]:
    """The metrics, each with its words and unit, in the order of the table of metrics."""
    known = [name for name in METRICS if name in entry.metrics]
    others = [name for name in entry.metrics if name not in METRICS]
    return [
        f"{METRICS[name].words} {shown(entry.metrics[name])} {METRICS[name].unit}".rstrip()
        if name in METRICS
        else f"{name} {shown(entry.metrics[name])}"
        for name in (*known, *others)
    ]


def shown(value: Any) -> str:
    """A value in a sentence: four digits, thousands apart."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
