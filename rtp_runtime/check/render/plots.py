"""Error by token position as inline SVG: log scale, the allowed error as a line, windows and chunk ends marked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from html import escape

from rtp_runtime.check.report import NOT_FINITE, Curve, Mark

WIDTH, HEIGHT = 348, 178
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 20, 26
FLOOR = 1e-9
"""No axis goes below this; zeros are drawn at its lower end."""
MAX_Y_LABELS = 5


def draw_curve(curve: Curve) -> str:
    """The SVG of one curve; an empty string when it has no points."""
    if not curve.positions:
        return ""
    finite = [error for error in curve.errors if error < NOT_FINITE]
    low = math.floor(math.log10(max(FLOOR, min([*filter(None, finite), curve.tolerance]))))
    high = max(low + 2, math.ceil(math.log10(max([*finite, curve.tolerance, FLOOR]) * 1.5)))
    last = max(1, curve.positions[-1])

    def x_of(position: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * position / last

    def y_of(error: float) -> float:
        value = high if error >= NOT_FINITE else math.log10(max(error, 10.0**low))
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    points = [(x_of(place), y_of(error)) for place, error in zip(curve.positions, curve.errors, strict=True)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    beyond = "".join(
        f'<circle class="beyond" cx="{x:.1f}" cy="{y:.1f}" r="1.8"/>'
        for (x, y), error in zip(points, curve.errors, strict=True)
        if error > curve.tolerance
    )
    allowed = y_of(curve.tolerance)
    parts = [
        *_y_axis(low, high, y_of),
        *_x_axis(last, x_of),
        *_marks(curve.marks, x_of),
        f'<line class="allowed" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{allowed:.1f}" y2="{allowed:.1f}"/>',
        f'<polyline class="curve" points="{line}"/>',
        beyond,
    ]
    words = f"error by position of {curve.name}, {curve.what}, {curve.prompt}"
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(words)}">{"".join(parts)}</svg>'
    )


def _y_axis(low: int, high: int, y_of: object) -> list[str]:
    assert callable(y_of)
    step = max(1, math.ceil((high - low) / (MAX_Y_LABELS - 1)))
    parts = []
    for decade in range(low, high + 1, step):
        y = y_of(10.0**decade)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y:.1f}" text-anchor="end" dominant-baseline="central">'
            f'10<tspan dy="-4" font-size="8">{decade}</tspan></text>'
        )
    return parts


def _x_axis(last: int, x_of: object) -> list[str]:
    assert callable(x_of)
    places = sorted({0, last // 2, last}) if last >= 2 else [0, last]
    anchors = {places[0]: "start", places[-1]: "end"}
    return [
        f'<text class="tick" x="{x_of(place):.1f}" y="{HEIGHT - 9}" text-anchor="{anchors.get(place, "middle")}">'
        f"{'token ' if place == last else ''}{place}</text>"
        for place in places
    ]


def _marks(marks: Sequence[Mark], x_of: object) -> list[str]:
    """A dotted line for each mark; words once for marks that are called alike, rare ones first, none over others."""
    assert callable(x_of)
    parts, named, taken = [], set[str](), list[tuple[float, float]]()
    often = Counter(mark.words for mark in marks)
    for mark in sorted(marks, key=lambda mark: (often[mark.words], mark.position)):
        x = x_of(mark.position)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{HEIGHT - BOTTOM}"/>')
        length = 5.2 * len(mark.words)
        start = min(x + 3, WIDTH - RIGHT - length)
        free = all(start + length + 6 < left or start > right + 6 for left, right in taken)
        if mark.words not in named and free:
            parts.append(f'<text class="tick" x="{start:.1f}" y="{TOP - 8}">{escape(mark.words)}</text>')
            named.add(mark.words)
            taken.append((start, start + length))
    return parts
