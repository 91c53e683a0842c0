"""A decoder layer as a straight-line program: which sums of earlier values each of its blocks is given."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from rtp_runtime.enable.blocks import Attention, Block, Mlp
from rtp_runtime.enable.findings import Layer, Step, UnrecognisedError
from rtp_runtime.enable.match import combination, same
from rtp_runtime.enable.recognise.blocks import recognise_block
from rtp_runtime.enable.recognise.view import View, leaf, linears, rows
from rtp_runtime.enable.recording import Call


def recognise_layer(view: View, name: str) -> Layer:
    """The blocks and residual sums of the decoder layer `name`.

    Raises:
        UnrecognisedError: a block that is none of ours, or a step that is no sum.
    """
    call = view.recording.of(name)
    own = [parameter for parameter, _ in view.module(name).named_parameters(recurse=False)]
    if own:
        raise UnrecognisedError(
            view.label(name), f"it holds parameters of its own ({', '.join(own)}).", "those steps by hand"
        )
    children = [child for child in view.recording.children(name) if not _passes(child)]
    blocks = {leaf(child.name): recognise_block(view, child.name) for child in children}
    values: dict[str, Tensor] = {"hidden": call.inputs[0]}
    steps = []
    for child in children:
        inputs = _sum(view, child.name, child.inputs[0], values)
        added = _residual(view, child, blocks[leaf(child.name)])
        if added is not None:
            given: Any = blocks[leaf(child.name)]
            blocks[leaf(child.name)] = dataclasses.replace(given, residual=True)
        residual = None if added is None else _sum(view, child.name, added, values)
        steps.append(Step(leaf(child.name), inputs, residual))
        values[leaf(child.name)] = child.outputs[0]
    output = _sum(view, name, call.outputs[0], values)
    return Layer(type(view.module(name)).__name__, blocks, tuple(steps), output)


def _residual(view: View, call: Call, block: Block) -> Tensor | None:
    """What a block adds its result to, where it is handed that; else None."""
    if not isinstance(block, Attention | Mlp) or len(call.inputs) < 2:
        return None
    result = rows(call.outputs[0])
    for inner in reversed(linears(view.recording.inside(call.name))):
        out = rows(inner.outputs[0])
        if out.shape != result.shape or same(out, result):
            continue
        for part in call.inputs[1:]:
            if part.numel() == out.numel() and same(out + rows(part), result):
                return part
    return None


def _passes(call: Call) -> bool:
    """Dropout in eval mode, identities."""
    return isinstance(call.module, nn.Dropout | nn.Identity)


def _sum(view: View, name: str, wanted: Tensor, values: dict[str, Tensor]) -> dict[str, float]:
    found = combination(wanted, values)
    if found is None:
        raise UnrecognisedError(
            view.label(name),
            f"it is given (or gives) no sum of {', '.join(values)}.",
            "the steps between written by hand",
        )
    return found
