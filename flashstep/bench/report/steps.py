"""Where a step's time goes: how step times spread, parts of a step against their floors, and how far each is from its floor.

Takes entries of forward, latency, decode and probe; gives sections. Times are in microseconds.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flashstep.bench.ledger import Entry
from flashstep.bench.report.charts import HEIGHT, INK, ROW, Look, Panel, Picture
from flashstep.bench.report.rows import MOST_GROUPS, grouped, named, shown
from flashstep.bench.report.section import Grid, Section

STEPPED = ("latency", "decode", "probe")
NO_PARTS = "Parts of a step are told by bench forward on a CUDA device; no entry here has them."


class Part(NamedTuple):
    """A part of a case (or the whole step): each arm's time, the median of its entries, and the floor if it has one."""

    name: str
    us: dict[str, float]
    floor_us: float | None


def times(entries: Sequence[Entry], looks: Mapping[str, Look]) -> Section:
    """The distribution of step times of each workload."""
    chosen = [entry for entry in entries if entry.kind in STEPPED and entry.samples.column("step_us")]
    pictures = []
    groups = grouped(chosen)
    for name, members in list(groups.items())[:MOST_GROUPS]:
        panel = Panel(f"Distribution of step times, {name}", x="step time, us", y="share of steps")
        found: dict[str, list[float]] = {}
        for member in members:
            found.setdefault(named(member), []).extend(member.samples.column("step_us").values())
        for label, values in found.items():
            panel.steps(values, label, looks[label])
        panel.shares()
        panel.axes.set_ylim(0, 1.02)
        told = "; ".join(
            f"{label}: median {statistics.median(values):,.0f} us" for label, values in found.items()
        )
        pictures.append(panel.picture(f"{name}. {told}."))
    return Section(
        "Step times",
        "The share of steps that took at most this long, all runs of an arm together.",
        pictures,
        missing="" if pictures else "No entry of latency, decode or probe has step times.",
    )


def breakdown(entries: Sequence[Entry], looks: Mapping[str, Look]) -> Section:
    """For each case its parts, each arm's time as a bar, the floor as a line across it."""
    pictures, rows = [], []
    found = _cases(entries)
    for case, parts in list(found.items())[:MOST_GROUPS]:
        pictures.append(_bars(case, parts, looks))
        for part in parts:
            for label, us in part.us.items():
                floor = "-" if part.floor_us is None else f"{part.floor_us:,.1f}"
                rows.append([case, part.name, label, f"{us:,.1f}", floor])
    more = (
        f"{len(found) - MOST_GROUPS} more cases are in the table only. " if len(found) > MOST_GROUPS else ""
    )
    with_parts = any(len(parts) > 1 for parts in found.values())
    return Section(
        "Step time by part",
        "Bars are measured, the median of an arm's entries; a vertical line is the floor that physics leaves.",
        pictures,
        [
            Grid(
                "The same as numbers, us",
                ("case", "part", "arm", "measured", "floor"),
                rows,
                frozenset({3, 4}),
            )
        ]
        if rows
        else [],
        more + ("" if with_parts else NO_PARTS),
    )


def distance(entries: Sequence[Entry], looks: Mapping[str, Look]) -> Section:
    """For each case the ratio of every part's time to its floor: the distance to the roofline."""
    pictures = []
    for case, parts in list(_cases(entries).items())[:MOST_GROUPS]:
        bounded = [part for part in parts if part.floor_us and any(us > 0 for us in part.us.values())]
        if not bounded:
            continue
        panel = Panel(
            f"Distance to the floor, {case}",
            x="measured / floor",
            height=0.9 + ROW * len(bounded),
            x_scale="log",
        )
        panel.axes.axvline(1, color=INK, linewidth=1.2)
        for place, part in enumerate(bounded):
            for label, us in part.us.items():
                if us > 0 and part.floor_us:
                    panel.point(us / part.floor_us, place, label, looks[label])
        panel.rows([part.name for part in bounded])
        ratios = [
            us / part.floor_us for part in bounded for us in part.us.values() if us > 0 and part.floor_us
        ]
        panel.log_range(min(0.8, *ratios) * 0.9, max(2.0, *ratios) * 1.25)
        pictures.append(
            panel.picture(f"{case}: how many times its floor each part takes; the line at 1 is the floor.")
        )
    return Section(
        "Distance to the floors",
        "Time of each part over its floor: what is far right has most to gain, weighed by its time above.",
        pictures,
        missing="" if pictures else NO_PARTS.replace("them", "floors"),
    )


def _bars(case: str, parts: Sequence[Part], looks: Mapping[str, Look]) -> Picture:
    """The parts, or where there are none the whole step; a whole beside its parts would only make them small."""
    whole, *pieces = parts
    shown_parts = pieces or [whole]
    labels = list(whole.us)
    thick = 0.8 / len(labels)
    height = 0.9 + ROW * len(shown_parts) * max(1, len(labels) / 2)
    panel = Panel(f"Step time by part, {case}", x="us", height=min(height, 4 * HEIGHT))
    for place, part in enumerate(shown_parts):
        for number, label in enumerate(labels):
            if label in part.us:
                at = place - 0.4 + thick * (number + 0.5)
                panel.bar(at, part.us[label], label, looks[label], thickness=thick * 0.9)
        if part.floor_us is not None:
            panel.axes.plot([part.floor_us] * 2, [place - 0.45, place + 0.45], color=INK, linewidth=1.6)
    panel.rows([part.name for part in shown_parts])
    panel.axes.set_xlim(left=0)
    told = "; ".join(f"{label} {us:,.0f} us" for label, us in whole.us.items())
    floor = "" if whole.floor_us is None else f"; floor {whole.floor_us:,.0f} us"
    return panel.picture(f"{case}, the whole step: {told}{floor}.")


def _cases(entries: Sequence[Entry]) -> dict[str, list[Part]]:
    """By case, the whole step first, then its parts in the order of a step."""
    whole: dict[str, dict[str, dict[str, list[float]]]] = {}
    floors: dict[tuple[str, str], float | None] = {}
    for entry in entries:
        for case in entry.detail.get("cases", ()) if entry.kind == "forward" else ():
            for name, us, floor_us in _measured(case):
                found = whole.setdefault(case["case"], {}).setdefault(name, {})
                found.setdefault(named(entry), []).append(us)
                floors.setdefault((case["case"], name), floor_us)
    return {
        case: [
            Part(
                name, {label: statistics.median(values) for label, values in arms.items()}, floors[case, name]
            )
            for name, arms in parts.items()
        ]
        for case, parts in whole.items()
    }


def _measured(case: Mapping[str, Any]) -> list[tuple[str, float, float | None]]:
    parts = [
        (part["name"], part["us"], part["floor_us"])
        for part in case.get("parts", ())
        if part["us"] is not None
    ]
    return [("whole step", case["us"], case["floor_us"]), *parts]


def chains(entries: Sequence[Entry]) -> Section:
    """Medians of op chains and programmatic launches, as a table."""
    rows = []
    for entry in entries:
        if entry.kind not in ("chain", "pdl"):
            continue
        by_name: dict[str, list[float]] = {}
        for key, us in entry.samples.column("chain_us").items():
            by_name.setdefault(key.rsplit(" #", 1)[0], []).append(us)
        rows += [
            [named(entry), entry.kind, name, shown(statistics.median(us))] for name, us in by_name.items()
        ]
    return Section(
        "Op chains",
        "One replay of a captured graph, the median.",
        tables=[Grid("Medians", ("arm", "kind", "chain", "us"), rows, frozenset({3}))] if rows else [],
        missing="" if rows else "No entry of chain or pdl is here.",
    )
