"""A claim's picture: each round's line from A to B, and the paired differences with their interval. Needs matplotlib.

Takes a ``Claim`` with a comparison; writes SVG or PNG by the file's name. The same numbers give the same file.
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashstep.bench.claim import Claim, amount_words, interval_words, p_words
from flashstep.bench.compare import Compared

A, B, CONTROL, ZERO = "#4c72b0", "#c44e52", "#8c8c8c", "#555555"


def draw(claim: Claim, file: Path) -> None:
    """Write ``file``; ``ValueError`` where nothing could be compared."""
    primary = claim.primary
    if primary is None:
        raise ValueError(f"{file}: there is nothing to draw: {claim.paragraph}")
    mpl.rcParams["svg.hashsalt"] = "flashstep"
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    runs, gaps = figure.subplots(1, 2, width_ratios=(1, 1.2))
    _runs(runs, primary, claim.control)
    _gaps(gaps, primary, claim.control)
    asked = primary.measure
    figure.suptitle(
        f"{primary.words}: B - A {amount_words(asked, primary.difference, sign=True)} "
        f"({interval_words(asked, primary.interval)}), p = {p_words(primary.p)}; {claim.says}",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    metadata = {"Date": None} if file.suffix == ".svg" else {"Software": None}
    figure.savefig(file, metadata=metadata, dpi=150)


def _scale(found: Compared) -> tuple[float, str]:
    """Accuracy is drawn in percent."""
    return (100.0, "%") if found.measure.is_accuracy else (1.0, found.measure.unit)


def _runs(panel: Axes, primary: Compared, control: Compared | None) -> None:
    """Every run's value; of paired rounds joined by a line."""
    scale, unit = _scale(primary)
    columns = [(0, "A", A, primary.a), (1, "B", B, primary.b)]
    if control is not None:
        columns.insert(0, (-1, "control", CONTROL, control.b))
    if primary.rounds:
        for one, other in zip(primary.a, primary.b, strict=True):
            panel.plot([0, 1], [scale * one, scale * other], color=ZERO, linewidth=0.8, alpha=0.6, zorder=1)
    for place, _, colour, values in columns:
        panel.scatter([place] * len(values), scale * np.array(values), color=colour, s=18, zorder=2)
    panel.set_xticks([place for place, *_ in columns], [name for _, name, *_ in columns])
    panel.set_xlim(columns[0][0] - 0.5, 1.5)
    panel.set_ylabel(f"{primary.words} ({unit})" if unit else primary.words)
    panel.set_title("each round" if primary.rounds else "each run", loc="left", fontsize=9)


def _gaps(panel: Axes, primary: Compared, control: Compared | None) -> None:
    """Differences round by round as dots; means as squares with their intervals."""
    scale, unit = _scale(primary)
    rows = [(0, "B - A", B, primary)] + (
        [(1, "control - A", CONTROL, control)] if control is not None else []
    )
    panel.axvline(0, color=ZERO, linewidth=0.8)
    for row, _, colour, found in rows:
        dots = np.array(found.differences) * scale
        panel.scatter(dots, np.linspace(row - 0.3, row - 0.1, len(dots)), color=colour, s=16, alpha=0.7)
        interval = found.interval
        panel.plot([scale * interval.low, scale * interval.high], [row + 0.15] * 2, color=colour, linewidth=2)
        panel.plot([scale * found.difference], [row + 0.15], "s", color=colour, markersize=6)
        for place, other in enumerate(found.bootstrap):
            at = row + 0.25 + 0.08 * place
            panel.plot(
                [scale * other.low, scale * other.high], [at] * 2, color=colour, linewidth=1, alpha=0.5
            )
    panel.set_yticks([row for row, *_ in rows], [name for _, name, *_ in rows])
    panel.set_ylim(len(rows) - 0.4, -0.5)
    panel.set_xlabel(f"difference ({'points' if unit == '%' else unit})" if unit else "difference")
    panel.set_title(
        f"differences, {100 * primary.interval.confidence:.3g}% interval (thin: bootstrap)",
        loc="left",
        fontsize=9,
    )
