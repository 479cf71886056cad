"""Pictures: what is drawn, in whose colours, and that many values stay a small file."""

import itertools
import random
import re

import numpy as np

from flashstep.bench.report.charts import MOST_STAIRS, SERIES, VARIABLES, Look, Panel


def test_arms_never_look_the_same() -> None:
    seen = {(look.color, look.marker, look.dash) for look in map(Look, range(24))}
    assert len(seen) == 24
    assert len({Look(n).color for n in range(8)}) == len({Look(n).marker for n in range(8)}) == 8


def test_stairs_are_the_empirical_distribution() -> None:
    panel = Panel("x", x="ms", y="share")
    panel.steps([3.0, 1.0, 2.0, 2.0], "A", Look(0))
    (line,) = panel.axes.get_lines()
    assert list(zip(*line.get_data(), strict=True)) == [(1, 0), (1, 0.25), (2, 0.5), (2, 0.75), (3, 1)]


def test_many_values_keep_their_shape_in_a_small_picture() -> None:
    chance = random.Random(1)
    values = [chance.gauss(100, 10) for _ in range(200_000)]
    panel = Panel("x", x="ms", y="share")
    panel.steps(values, "A", Look(0))
    x, y = panel.axes.get_lines()[0].get_data()
    assert len(x) <= MOST_STAIRS + 1 and (min(x), max(x), y[-1]) == (min(values), max(values), 1)
    ordered = np.sort(values)
    real = np.searchsorted(ordered, x[1:], side="right") / len(ordered)
    assert np.abs(real - y[1:]).max() < 1e-4
    assert len(panel.picture("many").svg) < 60_000


def test_colours_and_identifiers_are_the_pages() -> None:
    pictures = []
    for _ in range(2):
        panel = Panel("<a> & b", x="$x$", y="")
        panel.point(1, 2, "A", Look(1), note="<8>")
        pictures.append(panel.picture("c").svg)
    for svg in pictures:
        assert not any(color in svg for color in (*SERIES, *VARIABLES))
        assert "var(--series-2)" in svg and "var(--ink)" in svg and "$x$" in svg
        assert "<title" in svg and "&lt;a&gt; &amp; b" in svg and "&lt;8&gt;" in svg
        used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg))
        assert used <= set(re.findall(r'id="([^"]+)"', svg))
    ids = [set(re.findall(r'id="([^"]+)"', svg)) for svg in pictures]
    assert not ids[0] & ids[1]


def test_ticks_of_a_wide_axis_are_few_and_inside() -> None:
    for low, high in ((0.7, 3.0), (0.9, 60.0), (20.0, 90_000.0), (1.0, 1.0001)):
        panel = Panel("x", x="ms", x_scale="log")
        panel.log_range(low, high)
        ticks = panel.axes.xaxis.get_majorticklocs()
        assert len(ticks) <= 8 and all(low <= tick <= high for tick in ticks)


def test_a_logarithmic_axis_says_so() -> None:
    assert Panel("x", x="ms", x_scale="log").axes.get_xlabel() == "ms (log scale)"
    assert Panel("x", x="ms").axes.get_xlabel() == "ms"


def test_long_numbers_of_an_axis_do_not_meet() -> None:
    for most in (9e288, 123_456_789.0, 98_765.0):
        panel = Panel("x", x="ms")
        panel.point(most, most, "A", Look(0))
        panel.from_zero(most, most)
        panel.picture("c")
        panel.figure.canvas.draw()
        low, high = panel.axes.get_xlim()
        drawn = [label for label in panel.axes.get_xticklabels() if low <= label.get_position()[0] <= high]
        boxes = [label.get_window_extent() for label in drawn]
        assert len(boxes) >= 2
        assert all(one.x1 + 30 < other.x0 for one, other in itertools.pairwise(boxes))
