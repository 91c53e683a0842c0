"""The whole decoder: embedding, layers, final norm and head, and what differs between layers."""

from __future__ import annotations

import itertools

from torch import nn

from rtp_runtime.enable.blocks import Attention
from rtp_runtime.enable.blocks.bridge import BridgedMixing
from rtp_runtime.enable.findings import Decoder, Layer, Rope, UnrecognisedError
from rtp_runtime.enable.match import same
from rtp_runtime.enable.recognise.ends import recognise_ends
from rtp_runtime.enable.recognise.kinds import find_kinds, find_parts, find_states, merge_blocks
from rtp_runtime.enable.recognise.layer import recognise_layer
from rtp_runtime.enable.recognise.stream import keeps_wide_stream
from rtp_runtime.enable.recognise.view import View, leaf
from rtp_runtime.enable.recording import Call


def recognise_decoder(view: View) -> Decoder:
    """Everything a model file needs, or the first block that cannot be rebuilt.

    Raises:
        UnrecognisedError: that block.
    """
    layer_calls = _layers(view)
    layers_name = layer_calls[0].name.rpartition(".")[0]
    base = layers_name.rpartition(".")[0]
    each = [recognise_layer(view, call.name) for call in layer_calls]
    layers = merge_blocks(view, each)
    module = view.reference.model
    return Decoder(
        architecture=type(module).__name__,
        model_class=type(view.module(base)).__name__,
        model_name=base,
        layers_name=leaf(layers_name),
        kinds=find_kinds(view, layers),
        parts=find_parts(view, layers, [call.name for call in layer_calls]),
        states=find_states(view, each),
        rope=_rope(view, each),
        residual_factors=_factors(view, layer_calls, each),
        wide_stream=keeps_wide_stream(view, layer_calls[0].name),
        **recognise_ends(view, base, layer_calls),
    )


def _layers(view: View) -> list[Call]:
    depth = view.config.num_hidden_layers
    for name, module in view.reference.model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            calls = [call for call in view.recording.calls if call.name.rpartition(".")[0] == name]
            if [call.name for call in calls] == [f"{name}.{layer}" for layer in range(depth)]:
                for before, after in itertools.pairwise(calls):
                    if not same(before.outputs[0], after.inputs[0]):
                        raise UnrecognisedError(
                            view.label(after.name),
                            "it is not given what the layer before it gave.",
                            "the step between layers",
                        )
                return calls
    raise UnrecognisedError(
        type(view.reference.model).__name__,
        f"no list of {depth} layers ran once each, in order.",
        "that order of layers",
    )


def _bridged_rope(view: View, layers: list[Layer]) -> Rope | None:
    """The reference's own tables, where only its own blocks take them."""
    blocks = (block for layer in layers for block in layer.blocks.values())
    target = next((block.rotary for block in blocks if isinstance(block, BridgedMixing) and block.rotary), None)
    if target is None:
        return None
    name = view.tables[0].module
    return Rope(type(view.module(name)).__name__, leaf(name), target=target)


def _rope(view: View, layers: list[Layer]) -> Rope | None:
    used = [
        (place, block)
        for place, layer in enumerate(layers)
        for block in layer.blocks.values()
        if isinstance(block, Attention) and block.rotary
    ]
    if not used:
        return _bridged_rope(view, layers)
    table = view.tables[0]
    shares = {block.partial for _, block in used}
    if any(isinstance(share, str) and "[kind]" in share for share in shares):
        shares.discard(None)
    if len(shares) != 1:
        raise UnrecognisedError(view.label(table.module), "layers turn different shares of heads.", "that rule")
    by_type = any(block.table for _, block in used)
    if by_type and any(block.table != view.config.layer_types[place] for place, block in used):
        raise UnrecognisedError(view.label(table.module), "layers use tables of other layer types.", "that rule")
    share = shares.pop()
    assert share is None or isinstance(share, str)
    # A table that is held by position is no table of frequencies: ours has another form, and so another name.
    name = leaf(table.module) if table.code is None else "rotary"
    wide = any(block.wide_turn for _, block in used)
    return Rope(
        type(view.module(table.module)).__name__, name, share, by_type, table.code or "rope_parameters(config)", wide
    )


def _factors(view: View, calls: list[Call], layers: list[Layer]) -> dict[float, str]:
    """The code of every residual factor that is not 1."""
    found: dict[float, str] = {}
    for call, layer in zip(calls, layers, strict=True):
        keys, label = view.keys_of(view.module(call.name)), view.label(call.name)
        for inputs in (*(step.inputs for step in layer.steps), layer.output):
            for value in inputs.values():
                if value != 1.0 and value not in found:
                    found[value] = view.express(value, keys, label, "a factor of its residual sum").code
    return found
