"""A line chart as a small SVG file, without a plotting library: curves of a run and the reliability of a confidence."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 560, 360, 52
COLOURS = ("#1f5fa8", "#c4512d", "#3c8a4f", "#7a4fa3")


@dataclasses.dataclass(frozen=True)
class Line:
    """Named points; ``dots`` draws each as a dot, else they are joined."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers from ``low`` to ``high``."""
    step = 10 ** math.floor(math.log10((high - low) / 2))
    step = next(step * m for m in (0.2, 0.5, 1, 2, 5) if (high - low) / (step * m) <= 6)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def write_chart(
    file: Path,
    lines: Sequence[Line],
    *,
    across: str,
    up: str,
    x: tuple[float, float],
    y: tuple[float, float],
) -> None:
    """Write the chart of ``lines`` over the ranges ``x`` and ``y`` with named axes."""

    def place(point: tuple[float, float]) -> tuple[float, float]:
        wide, high = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
        right = MARGIN + wide * (point[0] - x[0]) / (x[1] - x[0])
        return round(right, 1), round(HEIGHT - MARGIN - high * (point[1] - y[0]) / (y[1] - y[0]), 1)

    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="11">'
    parts = [head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for value in _ticks(*x):
        a, b = place((value, y[0])), place((value, y[1]))
        parts.append(f'<line x1="{a[0]}" y1="{a[1]}" x2="{b[0]}" y2="{b[1]}" stroke="#ddd"/>')
        parts.append(f'<text x="{a[0]}" y="{a[1] + 15}" text-anchor="middle">{value:g}</text>')
    for value in _ticks(*y):
        a, b = place((x[0], value)), place((x[1], value))
        parts.append(f'<line x1="{a[0]}" y1="{a[1]}" x2="{b[0]}" y2="{b[1]}" stroke="#ddd"/>')
        parts.append(f'<text x="{a[0] - 6}" y="{a[1] + 4}" text-anchor="end">{value:g}</text>')
    for index, line in enumerate(lines):
        colour = COLOURS[index % len(COLOURS)]
        points = [place(p) for p in line.points]
        if line.dots:
            parts += [f'<circle cx="{a}" cy="{b}" r="3.5" fill="{colour}"/>' for a, b in points]
        path = " ".join(f"{a},{b}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
        parts.append(
            f'<text x="{MARGIN + 8}" y="{MARGIN + 14 + 15 * index}" fill="{colour}">{line.name}</text>'
        )
    middle = HEIGHT / 2
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">{across}</text>')
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{up}</text>'
    )
    file.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")
