"""The whole decoder: embedding, layers, final norm and head, and what differs between layers."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from rtp_runtime.enable.findings import Attention, Decoder, Layer, Mlp, Rope, UnrecognisedError
from rtp_runtime.enable.match import combination, same
from rtp_runtime.enable.recognise.attention import LayerFacts, recognise_attention
from rtp_runtime.enable.recognise.layer import recognise_layer
from rtp_runtime.enable.recognise.mlp import recognise_mlp
from rtp_runtime.enable.recognise.norm import recognise_norm
from rtp_runtime.enable.recognise.per_layer import differing
from rtp_runtime.enable.recognise.view import View, leaf, rows
from rtp_runtime.enable.recording import Call


def recognise_decoder(view: View) -> Decoder:
    """Everything a model file needs, or the first block that cannot be rebuilt.

    Raises:
        UnrecognisedError: that block.
    """
    layer_calls = _layers(view)
    layers_name = layer_calls[0].name.rpartition(".")[0]
    base = layers_name.rpartition(".")[0]
    layer, attention, mlp, facts = _same_layers(view, layer_calls)
    embedding = _embedding(view, base)
    outer = [call for call in view.recording.children(base) if not call.name.startswith(layers_name)]
    norm_call = _final_norm(view, outer, layer_calls[-1])
    head, logit_scale, logit_cap = _head(view, norm_call)
    module = view.reference.model
    return Decoder(
        architecture=type(module).__name__,
        model_class=type(view.module(base)).__name__,
        model_name=base,
        embedding_name=leaf(embedding.name),
        layers_name=leaf(layers_name),
        norm_name=leaf(norm_call.name),
        head_name=head.name,
        head_bias=head.module.bias is not None,
        attention=attention,
        mlp=mlp,
        layer=layer,
        final_norm=recognise_norm(view, norm_call.name),
        rope=_rope(view, facts),
        per_layer=differing(view, facts),
        tied=head.module.weight is embedding.module.weight,
        logit_scale=logit_scale,
        logit_soft_cap=logit_cap,
        residual_factors=_factors(view, layer_calls[0], layer),
        **_scales(view, base, embedding, layer_calls[0]),
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


def _same_layers(view: View, calls: list[Call]) -> tuple[Layer, Attention, Mlp, list[LayerFacts]]:
    first: tuple[Layer, Attention, Mlp] | None = None
    facts = []
    for call in calls:
        layer = recognise_layer(view, call.name)
        attention, layer_facts = recognise_attention(view, f"{call.name}.{layer.attention_name}")
        found = (layer, attention, recognise_mlp(view, f"{call.name}.{layer.mlp_name}"))
        if first is not None and found != first:
            raise UnrecognisedError(
                view.label(call.name), "its blocks differ from layer 0's.", "a layer class of its own"
            )
        first = found
        facts.append(layer_facts)
    assert first is not None
    return *first, facts


def _embedding(view: View, base: str) -> Call:
    for call in view.recording.children(base):
        if isinstance(call.module, nn.Embedding) and torch.equal(call.inputs[0], view.recording.ids):
            return call
    raise UnrecognisedError(view.label(base), "no embedding of the token ids was seen.", "embeddings made another way")


def _scales(view: View, base: str, embedding: Call, first: Call) -> dict[str, Any]:
    """Factors between the embedding's rows, its output, and what the first layer is given."""
    table: Any = embedding.module.weight
    row = table[view.recording.ids]
    found = {}
    keys = view.keys_of(view.module(base), "hidden_size")
    for name, before, after in (
        ("embedding_scale", row, embedding.outputs[0]),
        ("hidden_scale", embedding.outputs[0], first.inputs[0]),
    ):
        factors = combination(after, {"x": before.detach()})
        if factors is None:
            raise UnrecognisedError(
                view.label(embedding.name),
                "more than a factor stands between it and the first layer.",
                "those steps (learned positions?)",
            )
        if factors["x"] != 1.0:
            found[name] = view.express(factors["x"], keys, view.label(base), "the factor of its embeddings").code
    if "embedding_scale" in found:
        found["embedding_class"] = type(embedding.module).__name__
    return found


def _final_norm(view: View, outer: list[Call], last: Call) -> Call:
    for call in outer:
        if call.inputs and call.inputs[0].shape == last.outputs[0].shape and same(call.inputs[0], last.outputs[0]):
            return call
    raise UnrecognisedError(
        view.label(last.name), "no final norm was given its output.", "whatever follows the last layer"
    )


def _head(view: View, norm: Call) -> tuple[Call, str | None, str | None]:
    """The output head, the factor of its logits and their soft cap."""
    heads = [call for call in view.recording.children("") if isinstance(call.module, nn.Linear)]
    block = type(view.reference.model).__name__
    if len(heads) != 1:
        raise UnrecognisedError(block, f"it has {len(heads)} output heads.", "one")
    head, logits = heads[0], rows(view.recording.logits)
    before = combination(head.inputs[0], {"x": norm.outputs[0]})
    if before is None:
        raise UnrecognisedError(view.label(head.name), "it is not given the final norm's output.", "the steps between")
    out = rows(head.outputs[0]) * before["x"]
    keys = view.keys_of(view.reference.model)
    if (factor := combination(logits, {"x": out})) is not None:
        total = factor["x"]
        return head, None if total == 1.0 else view.express(total, keys, block, "the factor of its logits").code, None
    for key in keys:
        cap = getattr(view.config, key)
        if isinstance(cap, float) and same(torch.tanh(out / cap) * cap, logits):
            return head, None, f"config.{key}"
    raise UnrecognisedError(
        block, "its logits are neither a factor times nor a soft cap of its head's output.", "that step"
    )


def _rope(view: View, facts: list[LayerFacts]) -> Rope | None:
    used = [fact for fact in facts if fact.table is not None]
    if not used:
        return None
    layouts = {(fact.layout, fact.partial) for fact in used}
    table = view.tables[0]
    if len(layouts) != 1:
        raise UnrecognisedError(
            view.label(table.module), "layers turn heads in different layouts.", "a layout per layer"
        )
    layout, partial = layouts.pop()
    by_type = any(fact.table for fact in used)
    if by_type and any(fact.table != view.config.layer_types[layer] for layer, fact in enumerate(facts) if fact.table):
        raise UnrecognisedError(view.label(table.module), "layers use tables of other layer types.", "that rule")
    assert layout is not None
    return Rope(type(view.module(table.module)).__name__, leaf(table.module), layout, partial, by_type)


def _factors(view: View, call: Call, layer: Layer) -> dict[float, str]:
    """The code of every residual factor that is not 1."""
    sums = [*(step.inputs for step in layer.steps), layer.output]
    values = {factor for inputs in sums for factor in inputs.values() if factor != 1.0}
    keys = view.keys_of(view.module(call.name))
    return {
        value: view.express(value, keys, view.label(call.name), "a factor of its residual sum").code for value in values
    }
