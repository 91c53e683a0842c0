"""Sorts decoder layers into kinds: which blocks are one, which rule says where each stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rtp_runtime.enable.blocks import BY_LAYER, Block, ByLayer
from rtp_runtime.enable.findings import Kind, Layer, Part
from rtp_runtime.enable.recognise.conditions import condition
from rtp_runtime.enable.recognise.view import View


def by_layer(view: View, values: Sequence[Any], what: str, where: Sequence[int] | None = None) -> Any:
    """A value per layer as one value, or as `ByLayer` with the rule of each.

    Args:
        where: the layers asked for; the values of others do not count. None = all.

    Raises:
        UnrecognisedError: no rule.
    """
    places = list(range(len(values))) if where is None else list(where)
    distinct: list[Any] = []
    for layer in places:
        if values[layer] not in distinct:
            distinct.append(values[layer])
    if len(distinct) == 1:
        return distinct[0]
    distinct.sort(key=lambda value: value is None or value == {})  # what is absent comes last: `window if … else None`
    left, cases = set(places), []
    for value in distinct[:-1]:
        holds = [values[layer] == value if layer in left else None for layer in range(len(values))]
        cases.append((condition(view, holds, what), value))
        left -= {layer for layer in left if values[layer] == value}
    return ByLayer((*cases, (None, distinct[-1])))


def merge_blocks(view: View, layers: Sequence[Layer]) -> list[Layer]:
    """Blocks that differ in fields by layer alone become one block, which says so itself."""
    groups: dict[tuple[str, Block], list[int]] = {}
    for place, layer in enumerate(layers):
        for name, block in layer.blocks.items():
            groups.setdefault((name, _base(block)), []).append(place)
    merged: dict[tuple[int, str], Block] = {}
    for (name, _), places in groups.items():
        block = _merged(view, name, layers, places)
        merged.update({(place, name): block for place in places})
    return [
        dataclasses.replace(layer, blocks={name: merged[place, name] for name in layer.blocks})
        for place, layer in enumerate(layers)
    ]


def _base(block: Block) -> Block:
    """The block without what may differ between layers."""
    neutral: Any = dataclasses.replace(block, **{field.name: None for field in _fields(block)})  # type: ignore[type-var]
    found: Block = neutral
    return found


def _fields(block: Any) -> list[Any]:
    return [field for field in dataclasses.fields(block) if field.metadata == BY_LAYER]


def _merged(view: View, name: str, layers: Sequence[Layer], places: Sequence[int]) -> Block:
    first: Any = layers[places[0]].blocks[name]
    values = {}
    for field in _fields(first):
        each = [getattr(layer.blocks.get(name), field.name, None) for layer in layers]
        values[field.name] = by_layer(view, each, f"{field.name} in {name}", places)
    found: Block = dataclasses.replace(first, **values)
    return found


def find_kinds(view: View, layers: Sequence[Layer]) -> tuple[Kind, ...]:
    """The layer classes of the model file, from layers whose blocks are merged."""
    groups: list[list[int]] = []
    keys: list[Any] = []
    for place, layer in enumerate(layers):
        key = _program(layer)
        if key not in keys:
            keys.append(key)
            groups.append([])
        groups[keys.index(key)].append(place)
    of = [keys.index(_program(layer)) for layer in layers]
    rule = by_layer(view, of, "another order of blocks")
    cases = rule.cases if isinstance(rule, ByLayer) else ((None, rule),)
    names = _class_names([layers[groups[kind][0]] for _, kind in cases])
    return tuple(_kind(view, layers, groups[kind], name, code) for (code, kind), name in zip(cases, names, strict=True))


def _program(layer: Layer) -> Any:
    """What layers of one class have in common."""
    calls = {name: block.takes for name, block in layer.blocks.items()}
    return layer.class_name, calls, layer.steps, layer.output


def _kind(view: View, layers: Sequence[Layer], places: Sequence[int], name: str, code: str | None) -> Kind:
    first = layers[places[0]]
    blocks = {
        child: by_layer(view, [layer.blocks.get(child) for layer in layers], f"another {child}", places)
        for child in first.blocks
    }
    return Kind(name, blocks, first.steps, first.output, code)


def _class_names(layers: Sequence[Layer]) -> list[str]:
    """The reference's name; where several kinds share it, with the block that tells them apart."""
    names: list[str] = []
    shared = [layer.class_name for layer in layers]
    taken = {block.class_name for layer in layers for block in layer.blocks.values()}
    for layer in layers:
        name = layer.class_name
        if shared.count(name) > 1:
            others = {child for other in layers if other is not layer for child in other.blocks}
            own = [child for child in layer.blocks if child not in others] or [str(len(names))]
            name = name.replace("DecoderLayer", "").removesuffix("Layer").removesuffix("Block")
            name += "".join(part.capitalize() for part in own[0].split("_")) + "Layer"
        if name in taken:
            name = name.removesuffix("Layer") + "DecoderLayer"
        names.append(name if name not in names else f"{name}{len(names)}")
    return names


def find_parts(view: View, layers: Sequence[Layer], names: Sequence[str]) -> tuple[Part, ...]:
    """Every distinct block with the rule of its layers, in the order in which they run.

    `names`: of the layers, as modules of the reference.
    """
    found: list[tuple[str, Block]] = []
    for layer in layers:
        place = 0
        for part in layer.blocks.items():
            if part in found:
                place = found.index(part) + 1
            else:
                found.insert(place, part)
                place += 1
    return tuple(_part(view, layers, names, name, block) for name, block in found)


def _part(view: View, layers: Sequence[Layer], names: Sequence[str], name: str, block: Block) -> Part:
    there = [layer.blocks.get(name) == block for layer in layers]
    layer = names[there.index(True)]
    renames = view.hub.renames(view.module(f"{layer}.{name}"), layer, name)
    return Part(name, block, condition(view, there, f"the block {name}"), renames)


def find_states(view: View, layers: Sequence[Layer]) -> ByLayer:
    """The states of each layer, from layers whose blocks are not merged yet: their codes are those of one layer."""
    each = [
        {name: code for block in layer.blocks.values() for name, code in block.states().items()} for layer in layers
    ]
    found = by_layer(view, each, "other states")
    return found if isinstance(found, ByLayer) else ByLayer(((None, found),))
