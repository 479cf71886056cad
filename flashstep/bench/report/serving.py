"""What users of a server feel: throughput against interactivity, and how times to first token and between tokens spread.

Takes entries of serve, replay and decode; gives sections. Definitions E13 to E19.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from flashstep.bench.ledger import Entry
from flashstep.bench.metrics import METRICS
from flashstep.bench.report.charts import Look, Panel, Picture
from flashstep.bench.report.rows import MOST_GROUPS, grouped, load, named, several, shown
from flashstep.bench.report.section import Grid, Section

INTERACTIVITY = {  # kind -> what its x is, in words
    "serve": "P90 interactivity, tokens/s and user",
    "replay": "P90 interactivity, tokens/s and user",
    "decode": "mean interactivity, tokens/s and request",
}
LATENCIES = ("ttft_ms", "itl_ms")
MOST_DRAWN = 3  # workloads whose latencies are drawn


def frontier(entries: Sequence[Entry], looks: Mapping[str, Look]) -> Section:
    """One picture for each kind and workload; points of one arm that no other point of it beats are joined."""
    chosen = [entry for entry in entries if entry.kind in INTERACTIVITY]
    usable = [(entry, place) for entry in chosen if (place := _place(entry)) is not None]
    pictures, rows = [], []
    groups = grouped([entry for entry, _ in usable], swept=True)
    for name, members in list(groups.items())[:MOST_GROUPS]:
        kind = members[0].kind
        panel = Panel(
            f"Throughput against interactivity, {name}", x=INTERACTIVITY[kind], y="output tokens/s, all users"
        )
        for label in dict.fromkeys(named(member) for member in members):
            of_arm = [member for member in members if named(member) == label]
            points = [(place, member) for member in of_arm if (place := _place(member)) is not None]
            for (x, y), member in points:
                panel.point(x, y, label, looks[label], note=load(member))
                rows.append([label, kind, load(member) or "-", shown(x), shown(y), member.id])
            front = pareto([place for place, _ in points])
            panel.axes.plot(*zip(*front, strict=True), color=looks[label].color, linestyle=looks[label].dash)
        places = [place for member in members if (place := _place(member)) is not None]
        panel.from_zero(max(x for x, _ in places), max(y for _, y in places))
        pictures.append(panel.picture(f"{name}. A number at a point is how many run at once."))
    left_out = len(chosen) - len(usable)
    missing = (
        "No entry of serve, replay or decode has both an interactivity and an output throughput."
        if not usable
        else _and_more(len(groups))
        + (
            f"Without interactivity or throughput, and not shown: {several(left_out, 'entry', 'entries')}."
            if left_out
            else ""
        )
    )
    tables = [
        Grid("The same as numbers", ("arm", "kind", "at once", "interactivity", "tokens/s", "entry"), rows)
    ]
    return Section(
        "Throughput against interactivity",
        "Further right is faster for each user, further up is more for all of them. P90 interactivity is 1 / p90 of ITL (E18): "
        "nine of ten users are at least that fast.",
        pictures,
        [table._replace(right=frozenset({2, 3, 4})) for table in tables if rows],
        missing,
    )


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other point beats in both, from left to right."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(points), key=lambda point: (-point[0], -point[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front[::-1]


def _place(entry: Entry) -> tuple[float, float] | None:
    """Interactivity and throughput of an entry; None where one is not known."""
    throughput = entry.metrics.get("output_tps")
    if throughput is None:
        return None
    if entry.kind == "decode":
        batch = entry.settings.get("batch_size")
        return (throughput / batch, throughput) if isinstance(batch, int) and batch > 0 else None
    speed = entry.metrics.get("p90_interactivity_tps")
    return None if speed is None else (speed, throughput)


def latencies(entries: Sequence[Entry], looks: Mapping[str, Look]) -> Section:
    """For each workload the distribution of each latency over requests, runs of an arm together."""
    chosen = [entry for entry in entries if entry.kind in ("serve", "replay")]
    pictures: list[Picture] = []
    rows: list[list[str]] = []
    groups = grouped(chosen)
    for number, (name, members) in enumerate(groups.items()):
        for column in LATENCIES:
            drawn = _spread(name, members, column, looks, rows)
            pictures += drawn if number < MOST_DRAWN else []
    head = ("arm", "workload", "latency", "requests", "p50", "p90", "p99", "unit")
    return Section(
        "Latency",
        "The share of requests that had at most this latency. A curve further left is faster.",
        pictures,
        [Grid("Percentiles over requests", head, rows, frozenset({3, 4, 5, 6}))] if rows else [],
        _and_more(len(groups), drawn=MOST_DRAWN)
        if pictures
        else "No entry of serve or replay has latencies of requests.",
    )


def _spread(
    name: str, members: Sequence[Entry], column: str, looks: Mapping[str, Look], rows: list[list[str]]
) -> list[Picture]:
    metric = METRICS[column]
    found: dict[str, list[float]] = {}
    runs: dict[str, int] = {}
    for member in members:
        values = list(member.samples.column(column).values())
        if values:
            found.setdefault(named(member), []).extend(values)
            runs[named(member)] = runs.get(named(member), 0) + 1
    if not found:
        return []
    everything = np.concatenate([np.asarray(values) for values in found.values()])
    wide = everything.min() > 0 and everything.max() > 20 * everything.min()
    panel = Panel(
        f"Distribution of {metric.words}, {name}",
        x=f"{metric.words}, {metric.unit}",
        y="share of requests",
        x_scale="log" if wide else "linear",
    )
    if wide:
        panel.log_range(everything.min(), everything.max())
    for label, values in found.items():
        panel.steps(values, label, looks[label])
        shares = [shown(float(value)) for value in np.percentile(values, (50, 90, 99))]
        rows.append([label, name, metric.words, str(len(values)), *shares, metric.unit])
    panel.shares()
    panel.axes.set_ylim(0, 1.02)
    told = "; ".join(
        f"{label}: {several(len(values), 'request')} in {several(runs[label], 'run')}"
        for label, values in found.items()
    )
    return [panel.picture(f"{metric.words.capitalize()}, {name}. {told}.")]


def _and_more(count: int, *, drawn: int = MOST_GROUPS) -> str:
    more = count - drawn
    return f"Workloads that are not drawn, only told as numbers: {more}. " if more > 0 else ""
