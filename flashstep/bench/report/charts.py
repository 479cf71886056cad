"""Pictures for a page: matplotlib figures as inline SVG whose colours are the page's own, so that they follow its dark mode.

Takes series of numbers; gives ``Picture``: SVG with an accessible name, and the series that its legend names. A figure is as wide
as a phone: text that is readable there is readable everywhere. Knows no entries.
"""

import html
import io
import itertools
import math
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

WIDTH, HEIGHT = 4.2, 3.0  # inches; 72 units each
ROW = 0.28  # inches of one row of a chart of rows
FONT = 10
TICKS = tuple(
    base * 10.0**power for power in range(-6, 10) for base in (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
)  # of logarithmic axes
MOST_TICKS = 6
MOST_LETTERS = 32  # of all numbers at an axis
MOST_STAIRS = 400
# colours that no picture has by chance, and what a page calls them
INK, MUTED, RULE = "#0100f0", "#0200f0", "#0300f0"
SERIES = tuple(f"#0{n}0a0f" for n in range(1, 9))
VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule"} | {
    color: f"--series-{number}" for number, color in enumerate(SERIES, 1)
}
MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")
Scale = Literal["linear", "log"]


class Look(NamedTuple):
    """How an arm looks everywhere on a page: colour, marker and line differ, so that none of them is needed alone.

    ``hollow``: its figures are not what the arm does (incomplete, faulty, wrong on purpose); lines are thin then.
    """

    number: int
    hollow: bool = False

    @property
    def face(self) -> str:
        """What its marks and bars are filled with."""
        return "none" if self.hollow else self.color

    @property
    def color(self) -> str:
        return SERIES[self.number % len(SERIES)]

    @property
    def marker(self) -> str:
        return MARKERS[(self.number + self._turn) % len(MARKERS)]

    @property
    def dash(self) -> str:
        return DASHES[(self.number + self._turn) % len(DASHES)]

    @property
    def _turn(self) -> int:
        """How often the colours have been used up before: the other two must differ then."""
        return self.number // len(SERIES)


class Picture(NamedTuple):
    """``svg`` stands in a page as it is; ``caption`` is shown below it, ``legend`` its series in order."""

    svg: str
    caption: str
    legend: tuple[tuple[str, Look], ...] = ()


class Panel:
    """One set of axes. ``name`` is what a screen reader says of the picture, and its identifier within the page."""

    _numbers = itertools.count(1)

    def __init__(
        self, name: str, *, x: str, y: str = "", height: float = HEIGHT, x_scale: Scale = "linear"
    ) -> None:
        mpl.rcParams.update(
            {
                "svg.fonttype": "none",  # text stays text: it is found, read aloud and follows the page's font
                "svg.hashsalt": "flashstep",
                "text.parse_math": False,  # a label is what a user typed
                "font.size": FONT,
            }
        )
        self.name = name
        self.figure = Figure(figsize=(WIDTH, height), layout="constrained")
        self.figure.patch.set_alpha(0)
        self.axes: Axes = self.figure.add_subplot()
        self.axes.patch.set_alpha(0)
        self.axes.set_xlabel(f"{x} (log scale)" if x_scale == "log" else x, color=INK)
        self.axes.set_ylabel(y, color=INK)
        self.axes.set_xscale(x_scale)
        self.axes.grid(visible=True, color=RULE, linewidth=0.6)
        self.axes.set_axisbelow(True)
        self.axes.tick_params(colors=INK, which="both", length=3)
        for spine in self.axes.spines.values():
            spine.set_color(MUTED)
        for side in ("top", "right"):
            self.axes.spines[side].set_visible(False)
        if x_scale == "linear":
            self.axes.xaxis.set_major_locator(MaxNLocator(5))
        self.axes.xaxis.set_major_formatter(FuncFormatter(_figures))
        self.axes.yaxis.set_major_formatter(FuncFormatter(_figures))
        self._legend: dict[str, Look] = {}

    def line(
        self,
        x: Sequence[float],
        y: Sequence[float],
        label: str,
        look: Look,
        *,
        marker: str = "",
        stairs: bool = False,
    ) -> None:
        """``marker`` stands at each point; ``stairs``: ``y`` holds until the next point."""
        how = "steps-post" if stairs else "default"
        self.axes.plot(
            x,
            y,
            color=look.color,
            linestyle=look.dash,
            linewidth=0.8 if look.hollow else 1.6,
            marker=marker,
            markersize=5,
            markerfacecolor=look.face,
            drawstyle=how,
        )
        self._legend[label] = look

    def steps(self, values: Sequence[float], label: str, look: Look) -> None:
        """The share of ``values`` at or below each of them; of very many only some are drawn, evenly, with least and most."""
        ordered = np.sort(np.asarray(values, dtype=float))
        shares = np.arange(1, len(ordered) + 1) / len(ordered)
        if len(ordered) > MOST_STAIRS:
            drawn = np.linspace(0, len(ordered) - 1, MOST_STAIRS).round().astype(int)
            ordered, shares = ordered[drawn], shares[drawn]
        x = np.concatenate([ordered[:1], ordered])
        self.line(x.tolist(), np.concatenate([[0.0], shares]).tolist(), label, look, stairs=True)

    def point(self, x: float, y: float, label: str, look: Look, *, note: str = "") -> None:
        self.axes.plot(
            [x],
            [y],
            marker=look.marker,
            color=look.color,
            markerfacecolor=look.face,
            linestyle="none",
            markersize=6,
        )
        if note:  # on the left for every other arm: arms often lie side by side
            right = look.number % 2 == 1
            self.axes.annotate(
                note,
                (x, y),
                xytext=(5, 3) if right else (-6, -2),
                textcoords="offset points",
                ha="left" if right else "right",
                va="center",
                fontsize=8,
                color=INK,
            )
        self._legend[label] = look

    def bar(self, y: float, x: float, label: str, look: Look, *, thickness: float) -> None:
        self.axes.barh(y, x, thickness, facecolor=look.face, edgecolor=look.color)
        self._legend[label] = look

    def rows(self, names: Sequence[str]) -> None:
        """Name the places 0, 1, .. of the y axis, from the top."""
        self.axes.set_yticks(range(len(names)), names)
        self.axes.set_ylim(len(names) - 0.4, -0.6)

    def from_zero(self, x: float, y: float) -> None:
        """Both axes begin at 0 and end a little behind ``x`` and ``y``."""
        self.axes.set_xlim(0, 1.15 * x)
        self.axes.set_ylim(0, 1.15 * y)

    def shares(self, *, axis: Literal["x", "y"] = "y") -> None:
        """That axis is a share: 0% to 100%."""
        chosen = self.axes.yaxis if axis == "y" else self.axes.xaxis
        chosen.set_major_formatter(PercentFormatter(1.0))

    def log_range(self, low: float, high: float) -> None:
        """A logarithmic x axis over this range, with a few ticks that read as numbers."""
        self.axes.set_xlim(low, high)
        inside = [tick for tick in TICKS if low <= tick <= high]
        powers = [tick for tick in inside if math.log10(tick) == round(math.log10(tick))]
        chosen = inside if len(inside) <= MOST_TICKS else inside[:: -(-len(inside) // MOST_TICKS)]
        self.axes.xaxis.set_major_locator(FixedLocator(powers if len(powers) >= MOST_TICKS - 2 else chosen))
        self.axes.xaxis.set_minor_locator(NullLocator())

    def _thin_ticks(self) -> None:
        """Fewer ticks of a linear x axis whose numbers are long, that they do not meet."""
        axis = self.axes.xaxis
        if self.axes.get_xscale() == "linear" and isinstance(axis.get_major_locator(), MaxNLocator):
            ticks = list(axis.get_major_locator()())
            if sum(len(label) for label in axis.get_major_formatter().format_ticks(ticks)) > MOST_LETTERS:
                axis.set_major_locator(MaxNLocator(2))

    def picture(self, caption: str) -> Picture:
        """The SVG, with the page's colours and identifiers of its own."""
        self._thin_ticks()
        out = io.StringIO()
        self.figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        number = next(self._numbers)
        return Picture(_inline(out.getvalue(), self.name, number), caption, tuple(self._legend.items()))


def _figures(value: float, _: object = None) -> str:
    """A number of an axis, short: 1,200 or 0.25 or 1.2M."""
    if abs(value) >= 1e15:
        return f"{value:.1e}"
    for name, least in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if abs(value) >= least:
            return f"{value / least:.4g}{name}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _inline(svg: str, name: str, number: int) -> str:
    """An XML file as a part of a page: without its head and sizes, identifiers and colours made the page's."""
    body = svg[svg.index("<svg") :]
    opening, _, inner = body.partition(">")
    box = re.search(r'viewBox="[^"]*"', opening)
    assert box is not None
    inner = re.sub(r"<metadata>.*?</metadata>", "", inner, flags=re.DOTALL)
    inner = re.sub(r'\bid="', f'id="p{number}-', inner)
    inner = re.sub(r'(xlink:href="#|url\(#)', lambda found: f"{found[1]}p{number}-", inner)
    inner = inner.replace("xlink:href", "href")
    for color, variable in VARIABLES.items():
        inner = inner.replace(color, f"var({variable})")
    title = f'<title id="t{number}">{html.escape(name)}</title>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box[0]} role="img" aria-labelledby="t{number}">'
    return f"{head}{title}{inner}"
