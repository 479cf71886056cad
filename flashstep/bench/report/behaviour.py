"""What a model does: drafts that stand by position, how evenly experts are loaded, how many questions are answered right.

Takes entries; gives sections.
"""

from collections.abc import Mapping, Sequence

from flashstep.bench.ledger import Entry, routing
from flashstep.bench.report.charts import ROW, Look, Panel
from flashstep.bench.report.rows import MOST_GROUPS, arm, grouped, named, shown
from flashstep.bench.report.section import Grid, Section

MOST_BARS = 40  # rows of one picture


def acceptance(entries: Sequence[Entry], looks: Mapping[str, Look]) -> Section:
    """One picture: the share of steps in which each draft stood, a line for each entry that knows it."""
    known = [entry for entry in entries if entry.detail.get("acceptance_by_position")]
    if not known:
        return Section(
            "Acceptance by position",
            "",
            missing="No entry here knows which drafts stood: none speculated, or none was told.",
        )
    panel = Panel("Share of drafts that stood, by position", x="place of the draft", y="share that stood")
    rows = []
    longest = 1
    for entry in known:
        rates = [float(rate) for rate in entry.detail["acceptance_by_position"]]
        label = named(entry)
        places = list(range(1, len(rates) + 1))
        longest = max(longest, len(rates))
        panel.line(places, rates, label, looks[named(entry)], marker=looks[named(entry)].marker)
        rows.append([label, entry.kind, *(f"{rate:.3f}" for rate in rates)])
    panel.axes.set_xticks(range(1, longest + 1))
    panel.axes.set_ylim(0, 1.04)
    panel.shares()
    width = max(map(len, rows))
    rows = [[*row, *[""] * (width - len(row))] for row in rows]
    head = ("arm", "kind", *map(str, range(1, width - 1)))
    return Section(
        "Acceptance by position",
        "Of the steps that had drafts, those in which the draft at this place stood. Synthetic acceptance measures nothing.",
        [panel.picture("Each line is one entry.")],
        [Grid("The same as numbers", head, rows, frozenset(range(2, width)))],
    )


def balancedness(entries: Sequence[Entry], looks: Mapping[str, Look]) -> Section:
    """Mean over most load of the parts, step by step where it was recorded."""
    pictures, rows = [], []
    stepped = [entry for entry in entries if _steps(entry)]
    for name, members in list(grouped(stepped).items())[:MOST_GROUPS]:
        panel = Panel(f"Balancedness of expert load, {name}", x="step", y="mean / most load")
        for member in members:
            values = _steps(member)
            panel.line(list(range(len(values))), values, named(member), looks[named(member)])
        panel.axes.set_ylim(0, 1.04)
        pictures.append(panel.picture(f"{name}. 1 is perfectly even."))
    for entry in entries:
        if "balancedness" in entry.metrics:
            window = entry.detail.get("balance", {}).get("window")
            told = "-" if window is None else f"{window:.3f}"
            rows.append(
                [
                    named(entry),
                    entry.kind,
                    routing(entry.falsified_by),
                    f"{entry.metrics['balancedness']:.3f}",
                    told,
                ]
            )
    head = ("arm", "kind", "routing", "mean of steps", "all steps together")
    return Section(
        "Balancedness of expert load",
        "The mean load of the ranks over the most loaded one's: 1 is even, lower is slower than it need be.",
        pictures,
        [Grid("By entry", head, rows, frozenset({3, 4}))] if rows else [],
        "" if rows or pictures else "No entry here recorded expert loads (--record-expert-loads).",
    )


def _steps(entry: Entry) -> list[float]:
    return [float(value) for value in entry.detail.get("balance", {}).get("by_step", ())]


def accuracy(entries: Sequence[Entry], looks: Mapping[str, Look]) -> Section:
    """For each set of questions a row for each run: its share of right answers and its own 95% interval."""
    chosen = [entry for entry in entries if entry.kind == "eval" and "accuracy" in entry.metrics]
    pictures, rows = [], []
    for name, members in list(grouped(chosen).items())[:MOST_GROUPS]:
        panel = Panel(f"Accuracy, {name}", x="right answers", height=0.9 + ROW * min(len(members), MOST_BARS))
        for place, member in enumerate(members):
            look, share, detail = looks[named(member)], member.metrics["accuracy"], member.detail
            low, high = detail.get("low", share), detail.get("high", share)
            if place < MOST_BARS:
                panel.axes.plot([low, high], [place, place], color=look.color, linewidth=2)
                panel.point(share, place, named(member), look)
            rows.append(
                [
                    named(member),
                    str(member.settings.get("questions", "-")),
                    str(member.round),
                    f"{shown(detail.get('right', '-'))} of {shown(detail.get('answered', '-'))}",
                    f"{share:.2%}",
                    f"{low:.1%} to {high:.1%}",
                ]
            )
        panel.rows([f"{arm(member)[:20]}, run {member.round}" for member in members[:MOST_BARS]])
        panel.shares(axis="x")
        more = f" The first {MOST_BARS} of {len(members):,} runs." if len(members) > MOST_BARS else ""
        pictures.append(panel.picture(f"{name}. Lines are Wilson intervals of one run.{more}"))
    head = ("arm", "questions", "run", "right", "accuracy", "95% interval of the run")
    return Section(
        "Accuracy",
        "Intervals are of single runs; whether two arms differ is a claim of bench compare, which pairs their questions.",
        pictures,
        [Grid("By run", head, rows, frozenset({2, 3, 4}))] if rows else [],
        "" if rows else "No entry of eval is here.",
    )
