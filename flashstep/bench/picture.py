"""A picture of where steps go: each part's time beside its floor, one panel a case. Needs the ``bench`` extra (matplotlib)."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from flashstep.bench.results import Report

ROW = 0.24  # inches
OURS, FLOOR = "#4c72b0", "#c9c9c9"


def draw(report: Report, file: Path) -> None:
    """Write ``file`` (SVG by its name); cases that were not taken apart have no panel."""
    mpl.rcParams["svg.hashsalt"] = "flashstep"  # the same numbers give the same file
    cases = [case for case in report.cases if case.parts]
    heights = [0.9 + ROW * len(case.parts) for case in cases] or [1.0]
    figure = Figure(figsize=(8, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    for place, case in enumerate(cases):
        panel = figure.add_subplot(grid[place])
        names = [part.name for part in case.parts]
        rows = range(len(names))
        panel.barh(
            [row - 0.2 for row in rows],
            [part.us or 0 for part in case.parts],
            0.4,
            color=OURS,
            label="measured",
        )
        panel.barh(
            [row + 0.2 for row in rows],
            [part.floor_us or 0 for part in case.parts],
            0.4,
            color=FLOOR,
            label="floor",
        )
        panel.set_yticks(list(rows), names)
        panel.invert_yaxis()
        panel.set_xlabel("us")
        ratio = "" if case.ratio is None else f", {case.ratio:.2f} x floor"
        panel.set_title(f"{report.layout}  {case.case}: {case.us:,.0f} us{ratio}", loc="left", fontsize=10)
        panel.legend(frameon=False, loc="lower right")
    figure.savefig(file, metadata={"Date": None})
