"""The picture of a check: error by layer and module on a log scale against the tolerance, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rtp_runtime.check.report import Measure

CELL_WIDTH, LABEL_WIDTH, CHARACTER, TOP_LABEL_ANGLE = 30, 150, 6.3, 42
DECADES = 3
"""Decades below and above the tolerance that the colours tell apart."""

# From far below the tolerance to far above it; the step from green to amber is the tolerance itself.
SCALE = ("#0b6e4f", "#3a9d6e", "#86c99b", "#f4c95d", "#e07a3f", "#b3261e")


@dataclass(frozen=True, slots=True)
class Grid:
    """Measures laid out: one row per layer, one column per module."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[tuple[str, str], Measure]


def make_grid(measures: Sequence[Measure]) -> Grid:
    """Lay out the measures in execution order; of several on one place the worst is shown."""
    rows: dict[str, None] = {}
    columns: dict[str, None] = {}
    cells: dict[tuple[str, str], Measure] = {}
    for measure in measures:
        if measure.layer is None:
            continue
        place = (f"layer {measure.layer}", measure.column)
        rows[place[0]] = columns[place[1]] = None
        if place not in cells or measure.error > cells[place].error:
            cells[place] = measure
    return Grid(tuple(rows), tuple(_in_order(measures, columns)), cells)


def _in_order(measures: Sequence[Measure], columns: dict[str, None]) -> list[str]:
    """Columns as the layers execute them: a layer of another kind puts its own where they fall in it."""
    order: list[str] = []
    for layer in dict.fromkeys(measure.layer for measure in measures if measure.layer is not None):
        place = 0
        for column in dict.fromkeys(measure.column for measure in measures if measure.layer == layer):
            if column in order:
                place = order.index(column) + 1
            else:
                order.insert(place, column)
                place += 1
    return [column for column in order if column in columns]


def severity(error: float, tolerance: float) -> float:
    """log10(error / tolerance), clipped to the decades of the scale; 0 is exactly at the tolerance."""
    if error == 0.0:
        return -float(DECADES)
    if not math.isfinite(error):
        return float(DECADES)
    return max(-DECADES, min(DECADES, math.log10(error / tolerance)))


def colour(error: float, tolerance: float) -> str:
    """The colour of an error: greens up to the tolerance, amber to red beyond it."""
    value = severity(error, tolerance)
    if value <= 0:
        return SCALE[min(2, int((value + DECADES) / DECADES * 3))]
    return SCALE[3 + min(2, int(value / DECADES * 3))]


def draw_heatmap(measures: Sequence[Measure], first_wrong: tuple[str, int | None] | None) -> str:
    """The SVG, or an empty string when nothing stands in a layer. `first_wrong`: module and layer to be framed."""
    grid = make_grid(measures)
    if not grid.rows:
        return ""
    height = 26 if len(grid.rows) <= 12 else 18 if len(grid.rows) <= 40 else 11
    longest = max(map(len, grid.columns))
    top = int(longest * CHARACTER * math.sin(math.radians(TOP_LABEL_ANGLE))) + 22
    right = int(longest * CHARACTER * math.cos(math.radians(TOP_LABEL_ANGLE)))
    width = LABEL_WIDTH + CELL_WIDTH * len(grid.columns) + right
    wrong = (measure for measure in measures if (measure.name, measure.layer) == first_wrong and not measure.ok)
    first = next(wrong, None)
    parts = [_column_label(name, place, top) for place, name in enumerate(grid.columns)]
    for row, label in enumerate(grid.rows):
        y = top + row * height
        parts.append(
            f'<text class="label" x="{LABEL_WIDTH - 10}" y="{y + height * 0.7:.0f}" text-anchor="end">'
            f"{escape(label)}</text>"
        )
        for column, name in enumerate(grid.columns):
            measure = grid.cells.get((label, name))
            framed = measure is not None and measure is first
            parts.append(_cell(measure, LABEL_WIDTH + column * CELL_WIDTH, y, height, framed))
    total = top + height * len(grid.rows) + 8
    return (
        f'<svg class="heatmap" viewBox="0 0 {width} {total}" width="{width}" height="{total}" role="img" '
        f'aria-label="Relative error by layer and module">{"".join(parts)}</svg>'
    )


def _column_label(name: str, place: int, top: int) -> str:
    x, y = LABEL_WIDTH + place * CELL_WIDTH + CELL_WIDTH / 2, top - 8
    return f'<text class="label" transform="translate({x:.0f},{y}) rotate(-{TOP_LABEL_ANGLE})">{escape(name)}</text>'


def _cell(measure: Measure | None, x: int, y: int, height: int, framed: bool) -> str:
    box = f'x="{x + 1}" y="{y + 1}" width="{CELL_WIDTH - 2}" height="{height - 2}" rx="3"'
    if measure is None:
        return f'<rect class="absent" {box}/>'
    mark = ' class="first"' if framed else ""
    note = "" if measure.ok or measure.inputs_agree else " – its inputs differ already"
    title = f"{measure.name} ({measure.column}): {measure.error:.2e}, allowed {measure.tolerance:.0e}{note}"
    return f'<rect{mark} {box} fill="{colour(measure.error, measure.tolerance)}"><title>{escape(title)}</title></rect>'


def draw_legend() -> str:
    """The colour scale as SVG."""
    texts = ("10⁻³", "10⁻²", "10⁻¹", "tolerance", "10×", "100×", "1000×")
    width = 62
    boxes = "".join(
        f'<rect x="{20 + place * width}" y="4" width="{width - 2}" height="12" rx="2" fill="{fill}"/>'
        for place, fill in enumerate(SCALE)
    )
    labels = "".join(
        f'<text class="label" x="{20 + place * width}" y="32" text-anchor="middle">{text}</text>'
        for place, text in enumerate(texts)
    )
    total = 40 + width * len(SCALE)
    return f'<svg class="legend" width="{total}" height="38" role="img" aria-label="Colour scale">{boxes}{labels}</svg>'
