"""Line charts as inline SVG: a few series over a few places, legible without colour and without a script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 500, 290
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 44, 62
COLOURS = ("#2f6fb5", "#d1632a", "#3a8f5c", "#8a55b5", "#b59a2f", "#b5476f")
DASHES = ("", "7 4", "2 3", "9 3 2 3", "1 4", "12 4")


@dataclass(frozen=True, slots=True)
class Series:
    """One line: values by place; a place without one is a gap."""

    name: str
    values: Mapping[int, float]


def line_chart(title: str, x_name: str, unit: str, places: Sequence[int], series: Sequence[Series]) -> str:
    """The SVG. Places stand at equal distances, since they are mostly powers of two; the y axis starts at 0."""
    drawn = [each for each in series if each.values]
    top = nice_top(max((value for each in drawn for value in each.values.values()), default=0.0))
    parts = [f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>', _axes(x_name, unit, places, top)]
    if not drawn:
        parts.append(f'<text x="{LEFT + 12}" y="{TOP + 30}">nothing was measured here</text>')
    for number, each in enumerate(drawn):
        parts.append(_line(number, each, places, top, unit))
        parts.append(_legend(number, each.name, len(drawn)))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" role="img" aria-label="{escape(title, quote=True)}">'
        f"{''.join(parts)}</svg>"
    )


def nice_top(value: float) -> float:
    """The end of an axis that holds `value`: 1, 2, 2.5, 4, 5 or 8 times a power of ten."""
    if value <= 0.0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 4, 5, 8, 10) if step * power >= value * 0.999999)


def _x(place: int, count: int) -> float:
    span = WIDTH - LEFT - RIGHT
    return LEFT + span * (place + 0.5) / count


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top


def _axes(x_name: str, unit: str, places: Sequence[int], top: float) -> str:
    parts: list[str] = []
    for step in range(5):
        value = top * step / 4
        y = _y(value, top)
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    for number, place in enumerate(places):
        x = _x(number, len(places))
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{place}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - BOTTOM + 34}" text-anchor="end">{escape(x_name)}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 8}">{escape(unit)}</text>')
    return "".join(parts)


def _line(number: int, series: Series, places: Sequence[int], top: float, unit: str) -> str:
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
    points = [
        (_x(index, len(places)), _y(series.values[place], top), series.values[place], place)
        for index, place in enumerate(places)
        if place in series.values
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(series.name)}, {place}: '
        f"{_number(value)} {escape(unit)}</title></circle>"
        for x, y, value, place in points
    )
    stroke = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
    return f'<polyline points="{path}" fill="none" {stroke}/>{dots}'


def _legend(number: int, name: str, count: int) -> str:
    width = (WIDTH - LEFT - RIGHT) / max(count, 3)
    x, y = LEFT + width * number, HEIGHT - 12
    colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
    stroke = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
    return (
        f'<line x1="{x:.1f}" x2="{x + 24:.1f}" y1="{y - 4}" y2="{y - 4}" {stroke}/>'
        f'<text x="{x + 30:.1f}" y="{y}">{escape(name)}</text>'
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
