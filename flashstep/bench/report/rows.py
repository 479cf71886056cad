"""What a page says of entries: names of arms and their looks, groups that may stand in one picture, figures in words.

Takes ledger entries; gives strings and groups. Knows no HTML and no pictures.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flashstep.bench.ledger import Entry
from flashstep.bench.metrics import METRICS
from flashstep.bench.report.charts import Look
from flashstep.bench.report.plain import isolated

MOST_GROUPS = 6  # pictures of one kind on a page
SWEPT = (  # load, and how much of it: a sweep changes them, and its points are still of one workload
    "max_concurrency",
    "concurrency",
    "lanes",
    "batch_size",
    "request_rate",
    "arrivals",
    "ranks",
    "num_prompts",
    "num_warmups",
    "duration_s",
    "seed",
)
MOST_LETTERS = 32
MOST_TOLD, MOST_APART = 4, 8  # settings in the name of a group, and those by which it differs from others
PARTS = ("source", "shape", "arrivals", "body")  # of settings, whose names say nothing


def arm(entry: Entry) -> str:
    """The arm's label; without one, what was measured."""
    model = str(entry.subject.get("model") or "without a label")
    return isolated(entry.label or model.rstrip("/").rsplit("/", 1)[-1])


def marks(entry: Entry) -> list[str]:
    """Why pictures show this entry hollow: its figures are not what an arm does."""
    return [
        *([] if entry.complete else ["incomplete"]),
        *entry.falsified_by,
        *(["with faults"] if entry.faults else []),
    ]


def named(entry: Entry) -> str:
    """The arm with its ``marks``: entries of one such name may be drawn as one series."""
    found = marks(entry)
    return f"{arm(entry)} ({', '.join(found)})" if found else arm(entry)


def looks(entries: Sequence[Entry]) -> dict[str, Look]:
    """One for each arm, in the order in which they come, by the names of ``named``: hollow where there are marks."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(map(arm, entries)))}
    return {named(entry): Look(numbers[arm(entry)], hollow=bool(marks(entry))) for entry in entries}


def several(count: int, one: str, many: str = "") -> str:
    """ "1 run", "3 runs"."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def doubts(entry: Entry) -> list[str]:
    """What a reader must know before believing a figure of this entry."""
    return [
        *([] if entry.complete else ["incomplete"]),
        *entry.falsified_by,
        *(["uncommitted changes"] if entry.origin.dirty else []),
    ]


def grouped(entries: Sequence[Entry], *, swept: bool = False) -> dict[str, list[Entry]]:
    """Entries of the same kind and settings, by a name; ``swept``: those that differ in their load only are together."""
    groups: dict[bytes, list[Entry]] = {}
    for entry in entries:
        key = msgspec.json.encode([entry.kind, _flat(entry.settings, swept=swept)], order="deterministic")
        groups.setdefault(key, []).append(entry)
    firsts = [members[0] for members in groups.values()]
    names = [
        workload(first, [other for other in firsts if other.kind == first.kind], swept=swept)
        for first in firsts
    ]
    return {
        name if names.count(name) == 1 else f"{name} ({number})": members
        for number, (name, members) in enumerate(zip(names, groups.values(), strict=True), 1)
    }


def workload(entry: Entry, others: Sequence[Entry] = (), *, swept: bool = False) -> str:
    """A few words on the settings of ``entry``: what is otherwise in ``others``, and the first that say something."""
    settings = _flat(entry.settings, swept=swept)
    flat = [_flat(other.settings, swept=swept) for other in others]
    apart = [name for name in settings if any(other.get(name) != settings[name] for other in flat)]
    apart += [
        name for name in dict.fromkeys(name for other in flat for name in other) if name not in settings
    ]
    telling = [name for name, value in settings.items() if value and not isinstance(value, (bool, list))]
    told = [*apart, *(name for name in telling if name not in apart)][
        : max(MOST_TOLD, min(len(apart), MOST_APART))
    ]
    words = [f"{name.replace('_', ' ')} {_short(settings.get(name))}" for name in told]
    return f"{entry.kind}: {', '.join(words)}" if words else entry.kind


def _flat(settings: Mapping[str, Any], *, swept: bool) -> dict[str, Any]:
    """Settings that were given, by their own names where they are alone with them; a range is one value."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if value is None or (swept and name in SWEPT):
            continue
        if not isinstance(value, Mapping):
            found[name] = value
        elif value.keys() == {"low", "high"}:
            low, high = value["low"], value["high"]
            found[name] = low if low == high else f"{low} to {high}"
        else:
            for inner, it in _flat(value, swept=swept).items():
                other = found.get(inner, settings.get(inner))
                if other != it:
                    found[inner if name in PARTS and other is None else f"{name} {inner}"] = it
    return found


def _short(value: Any) -> str:
    """A setting in a few letters."""
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = shown(value) if isinstance(value, (int, float)) else value
    text = text if isinstance(text, str) else msgspec.json.encode(value).decode()
    return isolated(text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…")


def load(entry: Entry) -> str:
    """How much was asked at once, where the settings say it: the note at a point of a frontier."""
    for name in ("max_concurrency", "concurrency", "lanes", "batch_size"):
        value = entry.settings.get(name)
        if isinstance(value, int):
            return str(value)
    return ""


def figures(entry: Entry) -> list[str]:
    """The metrics, each with its words and unit, in the order of the table of metrics."""
    known = [name for name in METRICS if name in entry.metrics]
    others = [name for name in entry.metrics if name not in METRICS]
    return [
        f"{METRICS[name].words} {shown(entry.metrics[name])} {_unit(name)}".rstrip()
        if name in METRICS
        else f"{name} {shown(entry.metrics[name])}"
        for name in (*known, *others)
    ]


def _unit(name: str) -> str:
    """The unit of a metric, where its words do not say it: "tokens a step" are tokens."""
    metric = METRICS[name]
    return "" if metric.unit in metric.words.split() else metric.unit


def shown(value: Any) -> str:
    """A value in a sentence: four digits, thousands apart."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
