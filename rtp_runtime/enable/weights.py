"""Writes the weight descriptors of a recognised decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rtp_runtime.enable.declarations import Declarations, Place
from rtp_runtime.enable.findings import Decoder, Program


@dataclass(frozen=True)
class WeightCode:
    """The body of `weight_descriptors` as the template wants it."""

    axes: list[str]
    layers: list[str]
    """Variables with the layers of parts that do not stand in every one."""
    tensors: list[str]
    items: list[str]
    layouts: dict[str, list[str]]
    subsets: bool


def declare(d: Decoder) -> WeightCode:
    """Descriptors in the order of the module tree."""
    declarations = Declarations()
    subsets = _subsets(d)
    _outer(d, declarations, d.before)
    for part in d.parts:
        over = "layers" if part.condition is None else subsets[part.condition]
        part.block.declare(Place(declarations, 'LAYER + "', part.name, over, part.renames))
    _outer(d, declarations, d.after)
    _head(d, declarations)
    return WeightCode(
        axes=[line for lines in declarations.axes.values() for line in lines],
        layers=[
            f'{name} = {{"layer": [layer for layer in range(config.num_hidden_layers) if {condition}]}}'
            for condition, name in subsets.items()
        ],
        tensors=[line for lines in declarations.tensors.values() for line in lines],
        items=lines_of(declarations.items),
        layouts={name: lines_of(items) for name, items in declarations.layouts.items()},
        subsets=bool(subsets),
    )


def _outer(d: Decoder, declarations: Declarations, program: Program) -> None:
    """The embedding of tokens, and every module beside the layers where it first runs."""
    if program is d.before:
        embedding = Place(declarations, '"', f"{d.model_name}.{d.embedding_name}", over="", renames=d.outer_renames)
        embedding.weight("weight", "vocabulary", width_code(d.embedding_dim))
    earlier = {step.name for step in d.before.steps} if program is d.after else set()
    for step in program.steps:
        if step.name not in earlier:
            place = Place(declarations, '"', f"{d.model_name}.{step.name}", over="", renames=d.outer_renames)
            d.outer[step.name].declare(place)


def width_code(code: str) -> str:
    """A width as `weight_descriptors` calls it."""
    return "hidden" if code == "config.hidden_size" else code


def lines_of(items: Sequence[str]) -> list[str]:
    """Descriptors as lines, each with its comma."""
    return [line for text in items for line in f"{text},".split("\n")]


def _head(d: Decoder, declarations: Declarations) -> None:
    head = Place(declarations, '"', d.head_name, over="", renames=d.outer_renames)
    if d.tied:
        declarations.items.append(f'Tie({head.leaf("weight")}, "{d.model_name}.{d.embedding_name}.weight")')
    else:
        head.weight("weight", "vocabulary", width_code(d.head_dim))
    if d.head_bias:
        head.weight("bias", "vocabulary")


def _subsets(d: Decoder) -> dict[str, str]:
    """Condition -> the variable that holds its layers, called after the first block that stands there."""
    names: dict[str, str] = {}
    for part in sorted(d.parts, key=lambda part: part.block.word == "normed"):
        if part.condition is not None and part.condition not in names:
            name = f"{part.block.word}_layers"
            names[part.condition] = name if name not in names.values() else f"{name}_{len(names)}"
    return names
