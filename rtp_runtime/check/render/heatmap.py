"""Layer by module as inline SVG: each cell an error as a multiple of what is allowed there, on a log scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape

from rtp_runtime.check.report import NOT_FINITE, Measure

CELL_WIDTH, LABEL_WIDTH, CHARACTER, TOP_LABEL_ANGLE = 30, 64, 6.1, 48
DECADES = 3
"""Decades below and above the tolerance that the colours tell apart."""

# Blues up to the tolerance, amber to red beyond it: told apart by those who do not see red and green, too.
SCALE = ("#1f4e79", "#4a8cc2", "#a9cfe6", "#f6c85f", "#e5793b", "#b3261e")
HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="absent" width="6" height="6"/><rect class="stripe" width="2" height="6"/></pattern></defs>'
)


@dataclass(frozen=True, slots=True)
class Grid:
    """Measures laid out: one row per layer, one column per module."""

    rows: tuple[int, ...]
    columns: tuple[str, ...]
    cells: dict[tuple[int, str], Measure]
    unjudged: Mapping[tuple[int, str], str] = field(default_factory=dict)
    """Places of modules that exist and were not judged -> why."""
    roots: frozenset[tuple[str, int | None]] = frozenset()
    """(module, layer) of the findings that nothing before them explains."""

    def is_root(self, measure: Measure) -> bool:
        """Whether the fault is in this cell, not before it."""
        own = (measure.name, measure.layer) in self.roots and not measure.column.endswith(" input")
        return own and measure.inputs_agree and not measure.ok


def make_grid(
    measures: Sequence[Measure],
    unjudged: Mapping[str, str] | None = None,
    roots: frozenset[tuple[str, int | None]] = frozenset(),
) -> Grid:
    """Lay out the measures in execution order; of several on one place the worst is shown.

    `unjudged`: dotted name of a module inside a layer -> why it was not judged.
    """
    cells: dict[tuple[int, str], Measure] = {}
    prefixes: dict[str, int] = {}
    for measure in measures:
        if measure.layer is None:
            continue
        place = (measure.layer, measure.column)
        if place not in cells or measure.error > cells[place].error:
            cells[place] = measure
        if measure.column == "layer":
            prefixes[measure.name] = measure.layer
    missing: dict[tuple[int, str], str] = {}
    for name, why in (unjudged or {}).items():
        prefix = next((prefix for prefix in prefixes if name.startswith(f"{prefix}.")), None)
        if prefix is not None:
            missing[prefixes[prefix], name.removeprefix(f"{prefix}.")] = why
    columns = _in_order(measures)
    columns += [column for column in dict.fromkeys(column for _, column in missing) if column not in columns]
    return Grid(tuple(sorted({layer for layer, _ in cells})), tuple(columns), cells, missing, roots)


def _in_order(measures: Sequence[Measure]) -> list[str]:
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
    return order


def severity(error: float, tolerance: float) -> float:
    """log10(error / tolerance), clipped to the decades of the scale; 0 is exactly at the tolerance."""
    if error == 0.0:
        return -float(DECADES)
    if not math.isfinite(error) or error >= NOT_FINITE or tolerance <= 0.0:
        return float(DECADES)
    return max(-DECADES, min(DECADES, math.log10(error / tolerance)))


def colour(error: float, tolerance: float, decades: float = DECADES) -> str:
    """The colour of an error: blues up to the tolerance, amber to red beyond it; `decades`: of each half."""
    value = severity(error, tolerance) / decades
    if value <= 0:
        return SCALE[min(2, max(0, int((value + 1) * 3)))]
    return SCALE[3 + min(2, int(value * 3))]


@dataclass(frozen=True, slots=True)
class Look:
    """How a map is drawn. `unit`: what an error is called in its cell's words."""

    unit: str = "relative error"
    decades: float = DECADES
    roots: frozenset[tuple[str, int | None]] = frozenset()
    """(module, layer) of the findings that nothing before them explains."""
    height: int = 26


def draw_heatmap(
    measures: Sequence[Measure],
    first_wrong: tuple[str, int | None] | None,
    unjudged: Mapping[str, str] | None = None,
    look: Look | None = None,
) -> str:
    """The SVG, or an empty string when nothing stands in a layer. `first_wrong`: module and layer to be framed."""
    look = look or Look()
    grid = make_grid(measures, unjudged, look.roots)
    if not grid.rows:
        return ""
    height = 26 if len(grid.rows) <= 12 else 18 if len(grid.rows) <= 30 else 11
    look = replace(look, height=height)
    longest = max(map(len, grid.columns))
    top = int(longest * CHARACTER * math.sin(math.radians(TOP_LABEL_ANGLE))) + 18
    right = int(longest * CHARACTER * math.cos(math.radians(TOP_LABEL_ANGLE)))
    width = LABEL_WIDTH + CELL_WIDTH * len(grid.columns) + right
    wrong = (m for m in measures if (m.name, m.layer) == first_wrong and not m.ok)
    first = next(wrong, None)
    parts = [HATCH, *(_column_label(name, place, top) for place, name in enumerate(grid.columns))]
    for row, layer in enumerate(grid.rows):
        y = top + row * height
        if height >= 14 or _is_labelled(layer, first):
            parts.append(
                f'<text class="label" x="{LABEL_WIDTH - 8}" y="{y + height / 2:.1f}" text-anchor="end" '
                f'dominant-baseline="central">layer {layer}</text>'
            )
        for column, name in enumerate(grid.columns):
            parts.append(_cell(grid, (layer, name), (LABEL_WIDTH + column * CELL_WIDTH, y), first, look))
    total = top + height * len(grid.rows) + 6
    return (
        f'<svg class="heatmap" viewBox="0 0 {width} {total}" width="{width}" height="{total}" role="img" '
        f'aria-label="{look.unit} by layer and module">{"".join(parts)}</svg>'
    )


def _is_labelled(layer: int, first: Measure | None) -> bool:
    """Of narrow rows, every fifth has room for a label, and the accused one."""
    if first is not None and first.layer is not None and abs(layer - first.layer) < 2:
        return layer == first.layer
    return layer % 5 == 0


def _column_label(name: str, place: int, top: int) -> str:
    x, y = LABEL_WIDTH + place * CELL_WIDTH + CELL_WIDTH / 2, top - 6
    return f'<text class="label" transform="translate({x:.0f},{y}) rotate(-{TOP_LABEL_ANGLE})">{escape(name)}</text>'


def _cell(grid: Grid, place: tuple[int, str], corner: tuple[int, int], first: Measure | None, look: Look) -> str:
    measure, (x, y) = grid.cells.get(place), corner
    gap = 1 if look.height >= 14 else 0.5
    box = f'x="{x + 1}" y="{y + gap}" width="{CELL_WIDTH - 2}" height="{look.height - 2 * gap}" rx="2"'
    if measure is None:
        why = grid.unjudged.get(place)
        if why is None:
            return f'<rect class="absent" {box}/>'
        return f'<rect fill="url(#hatch)" {box}><title>{escape(f"{place[1]}: not judged: {why}")}</title></rect>'
    note = "" if measure.ok or grid.is_root(measure) else " – explained by what stands before it or in it"
    size = "not finite, or of another shape" if measure.error >= NOT_FINITE else f"{measure.error:.2e}"
    title = f"{measure.name} ({measure.column}): {look.unit} {size}, allowed {measure.tolerance:.3g}{note}"
    fill = colour(measure.error, measure.tolerance, look.decades)
    classes = "first" if measure is first else "follows" if note else ""
    mark = f' class="{classes}"' if classes else ""
    cell = f'<rect{mark} {box} fill="{fill}"><title>{escape(title)}</title></rect>'
    if grid.is_root(measure) and look.height >= 18:
        centre = f'cx="{x + CELL_WIDTH / 2}" cy="{y + look.height / 2}"'
        cell += f'<circle class="root" {centre} r="3.5"/>'
    return cell


def draw_legend(texts: Sequence[str] = ("10⁻³", "10⁻²", "10⁻¹", "allowed", "10×", "100×", "1000×")) -> str:
    """The colour scale as SVG, with the signs that cells may bear. `texts`: of the edges, seven."""
    width, x = 58, 26
    boxes = "".join(
        f'<rect x="{x + place * width}" y="4" width="{width - 2}" height="12" rx="2" fill="{fill}"/>'
        for place, fill in enumerate(SCALE)
    )
    labels = "".join(
        f'<text class="label" x="{x + place * width - 1}" y="31" text-anchor="middle">{text}</text>'
        for place, text in enumerate(texts)
    )
    x += width * len(SCALE) + 40
    signs = ""
    for fill, words, step in (
        ('fill="url(#hatch)"', "not judged", 104),
        ('class="absent"', "no such module", 132),
        (f'fill="{SCALE[4]}"', "the fault is here", 140),
        (f'class="follows" fill="{SCALE[4]}"', "a consequence", 130),
    ):
        signs += f'<rect {fill} x="{x}" y="4" width="18" height="12" rx="2"/>'
        signs += f'<circle class="root" cx="{x + 9}" cy="10" r="3"/>' if words.startswith("the") else ""
        signs += f'<text class="label" x="{x + 24}" y="10" dominant-baseline="central">{words}</text>'
        x += step
    return (
        f'<svg class="legend" viewBox="0 0 {x} 38" width="{x}" height="38" role="img" aria-label="Colour scale">'
        f"{HATCH}{boxes}{labels}{signs}</svg>"
    )
