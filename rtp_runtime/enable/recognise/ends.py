"""What stands before the first decoder layer and after the last: embeddings, positions, norms, the head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rtp_kernel.components import SinusoidalEmbedding
from rtp_runtime.enable.blocks import Block
from rtp_runtime.enable.blocks.lone import LoneLinear
from rtp_runtime.enable.blocks.positions import Positions
from rtp_runtime.enable.blocks.projection import Projection
from rtp_runtime.enable.findings import Program, Step, UnrecognisedError
from rtp_runtime.enable.match import combination, express, same
from rtp_runtime.enable.recognise.norm import recognise_norm
from rtp_runtime.enable.recognise.view import View, bias_of, is_linear, leaf, rows
from rtp_runtime.enable.recording import Call

TOKENS = "tokens"
"""The value that the embedding of tokens gives."""
COMPUTED = "positions"
"""Name of positions that the reference computes without a module."""


def recognise_ends(view: View, base: str, layers: Sequence[Call]) -> dict[str, Any]:
    """The fields of `Decoder` that say what stands around its layers.

    Raises:
        UnrecognisedError: a step that is none of ours.
    """
    embedding = _embedding(view, base)
    before, after = _around(view, base, layers)
    blocks: dict[str, Block] = {}
    first = _before(view, embedding, before, layers[0].inputs[0], blocks)
    head, last, factor = _after(view, after, layers[-1].outputs[0], blocks)
    scale, cap = _logits(view, head, base)
    return {
        "embedding_name": leaf(embedding.name),
        "embedding_dim": _width(view, embedding.outputs[0].shape[-1]),
        "head_name": head.name,
        "head_bias": bias_of(head.module),
        "head_dim": _width(view, head.inputs[0].shape[-1]),
        "tied": head.module.weight is embedding.module.weight,
        "outer": blocks,
        "before": first,
        "after": last,
        "head_scale": _head_scale(view, factor, base),
        "logit_scale": scale,
        "logit_soft_cap": cap,
        "outer_renames": _renames(view, [embedding.name, *(f"{base}.{name}" for name in blocks), head.name]),
        "hub_prefixes": view.hub.prefixes,
        **_scales(view, base, embedding, first),
    }


def _embedding(view: View, base: str) -> Call:
    for call in view.recording.children(base):
        if isinstance(call.module, nn.Embedding) and torch.equal(call.inputs[0], view.recording.ids):
            return call
    raise UnrecognisedError(view.label(base), "no embedding of the token ids was seen.", "embeddings made another way")


def _around(view: View, base: str, layers: Sequence[Call]) -> tuple[list[Call], list[Call]]:
    """Calls of the base's other modules before the first layer and after the last."""
    order = {id(call): place for place, call in enumerate(view.recording.calls)}
    start, end = order[id(layers[0])], order[id(layers[-1])]
    own = {call.name for call in layers}
    others = [call for call in view.recording.children(base) if call.name not in own]
    others = [call for call in others if call.inputs and call.outputs and not isinstance(call.module, nn.Dropout)]
    return (
        [call for call in others if order[id(call)] < start],
        [call for call in others if order[id(call)] > end],
    )


def _before(view: View, embedding: Call, calls: Sequence[Call], wanted: Tensor, blocks: dict[str, Block]) -> Program:
    values: dict[str, Tensor] = {TOKENS: embedding.outputs[0]}
    steps = []
    for call in calls:
        if call.name == embedding.name:
            continue
        found = _positions(view, call)
        inputs: dict[str, float] | None = {} if found else combination(call.inputs[0], values)
        block: Block | None = found or (None if inputs is None else _step(view, call))
        if block is not None and inputs is not None:
            blocks[leaf(call.name)] = block
            values[leaf(call.name)] = call.outputs[0]
            steps.append(Step(leaf(call.name), inputs))
    output = combination(wanted, values)
    for shift, table in _sinusoids(wanted) if output is None else ():
        output = combination(wanted, values | {COMPUTED: table})
        if output is not None:
            blocks[COMPUTED] = Positions(None, 0, shift)
            steps.append(Step(COMPUTED, {}))
            break
    if output is None:
        raise UnrecognisedError(
            view.label(embedding.name),
            f"what the first layer is given is no sum of {', '.join(values)}.",
            "the steps between them",
        )
    return _used(Program(tuple(steps), output), blocks)


def _used(program: Program, blocks: dict[str, Block]) -> Program:
    """Without the steps whose values nothing takes."""
    steps = list(program.steps)
    while True:
        taken = set(program.output) | {name for step in steps for name in step.inputs}
        kept = [step for step in steps if step.name in taken]
        if kept == steps:
            return Program(tuple(steps), program.output)
        for step in steps:
            if step not in kept:
                blocks.pop(step.name, None)
        steps = kept


def _step(view: View, call: Call) -> Block | None:
    """A norm or a projection; None for what is neither, which then must not be needed."""
    if is_linear(call.module):
        inner, outer = (_width(view, tensor.shape[-1]) for tensor in (call.inputs[0], call.outputs[0]))
        return LoneLinear(Projection("", bias_of(call.module)), inner, outer, sharded=False)
    if list(call.module.children()) or call.inputs[0].shape != call.outputs[0].shape:
        return None
    return recognise_norm(view, call.name)


def _positions(view: View, call: Call) -> Positions | None:
    """Learned or sinusoidal positions, by what they gave for positions 0, 1, …"""
    tokens, out = view.recording.ids.shape[1], call.outputs[0]
    if out.numel() != tokens * view.config.hidden_size:
        return None
    found = rows(out)
    weight = getattr(call.module, "weight", None)
    if isinstance(weight, Tensor) and weight.ndim == 2 and weight.shape[1] == found.shape[1]:
        for offset in range(min(4, len(weight) - tokens + 1)):
            if same(weight[offset : offset + tokens].detach(), found):
                return Positions(_rows(view, call, len(weight), offset), offset)
    for offset in range(4):
        for shift, table in _sinusoids(out, offset):
            if same(table, found):
                return Positions(None, offset, shift)
    return None


def _sinusoids(like: Tensor, offset: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Both formulas for as many rows."""
    tokens, width = rows(like).shape
    if width % 2 == 0:
        for shift in (0, 1):
            yield shift, SinusoidalEmbedding(width, shift)(torch.arange(tokens) + offset)


def _rows(view: View, call: Call, number: int, offset: int) -> str:
    keys = [key for key in ("max_position_embeddings", *view.reference.reads) if "position" in key or "n_ctx" in key]
    for more in dict.fromkeys((0, offset)):
        found = express(number - more, view.config, keys)
        if found is not None and "*" not in found.code:
            return f"{found.code} + {more}" if more else found.code
    return view.express(number, keys, view.label(call.name), "its number of rows").code


def _after(view: View, calls: Sequence[Call], given: Tensor, blocks: dict[str, Block]) -> tuple[Call, Program, float]:
    """The head, the steps up to it, and the factor of what it is given."""
    model = view.reference.model
    heads = [
        call
        for call in view.recording.children("")
        if isinstance(call.module, nn.Linear) and call.outputs[0].shape[-1] == view.config.vocab_size
    ]
    block = type(model).__name__
    if len(heads) != 1:
        raise UnrecognisedError(block, f"it has {len(heads)} output heads.", "one")
    values: dict[str, Tensor] = {"hidden": given}
    steps = []
    for call in calls:
        inputs = combination(call.inputs[0], values)
        found = _step(view, call) if inputs is not None else None
        if found is not None and inputs is not None:
            blocks[leaf(call.name)] = found
            values[leaf(call.name)] = call.outputs[0]
            steps.append(Step(leaf(call.name), inputs))
    output = combination(heads[0].inputs[0], values)
    if output is None or len(output) != 1:
        raise UnrecognisedError(
            view.label(heads[0].name), "it is not given the last norm's output.", "the steps between"
        )
    (name, factor), *_ = output.items()
    return heads[0], _used(Program(tuple(steps), {name: 1.0}), blocks), factor


def _logits(view: View, head: Call, base: str) -> tuple[str | None, str | None]:
    """The factor of the logits and their soft cap, as code."""
    block, logits, out = type(view.reference.model).__name__, rows(view.recording.logits), rows(head.outputs[0])
    keys = [*view.keys_of(view.reference.model), *view.keys_of(view.module(base))]
    if (scale := combination(logits, {"x": out})) is not None:
        total = scale["x"]
        return None if total == 1.0 else view.express(total, keys, block, "the factor of its logits").code, None
    for key in keys:
        cap = getattr(view.config, key)
        if isinstance(cap, float) and same(torch.tanh(out / cap) * cap, logits):
            return None, f"config.{key}"
    raise UnrecognisedError(
        block, "its logits are neither a factor times nor a soft cap of its head's output.", "that step"
    )


def _head_scale(view: View, factor: float, base: str) -> str | None:
    """Code of what the head's input is multiplied by."""
    keys = [*view.keys_of(view.reference.model), *view.keys_of(view.module(base))]
    block = type(view.reference.model).__name__
    return None if factor == 1.0 else view.express(factor, keys, block, "the factor of what its head is given").code


def _width(view: View, width: int) -> str:
    if width == view.config.hidden_size:
        return "config.hidden_size"
    keys = [key for key in view.reference.reads if "dim" in key or "size" in key]
    return view.express(width, keys, type(view.reference.model).__name__, "the width of its embedding").code


def _scales(view: View, base: str, embedding: Call, program: Program) -> dict[str, Any]:
    """Factors between the embedding's rows and its output, and of its output."""
    table: Any = embedding.module.weight
    keys = view.keys_of(view.module(base), "hidden_size")
    inside = combination(embedding.outputs[0], {"x": table[view.recording.ids].detach()})
    if inside is None:
        raise UnrecognisedError(view.label(embedding.name), "it is no factor times its rows.", "that step")
    outside = [p.get(TOKENS, 1.0) for p in (program.output, *(step.inputs for step in program.steps)) if TOKENS in p]
    found: dict[str, Any] = {}
    if inside["x"] != 1.0:
        code = view.express(inside["x"], keys, view.label(base), "the factor of its embeddings").code
        held = [value for key, value in vars(embedding.module).items() if "scale" in key and isinstance(value, float)]
        found = {"embedding_scale": code, "embedding_class": type(embedding.module).__name__}
        # A factor that is a number is not rounded; one that is a tensor has the model's dtype.
        found["embedding_rounds"] = not held or any(True for _ in embedding.module.buffers())
    if len(set(outside)) > 1:
        raise UnrecognisedError(view.label(embedding.name), "its rows are taken with two factors.", "those steps")
    if outside and outside[0] != 1.0:
        found["hidden_scale"] = view.express(outside[0], keys, view.label(base), "the factor of its embeddings").code
    for inputs in (program.output, *(step.inputs for step in program.steps)):
        if any(factor != 1.0 for name, factor in inputs.items() if name != TOKENS):
            raise UnrecognisedError(view.label(base), "its positions are added with a factor.", "that factor")
    return found


def _renames(view: View, modules: Sequence[str]) -> dict[str, str]:
    """Parameters outside the layers that checkpoints call otherwise."""
    found = {}
    for name, value in view.reference.model.named_parameters():
        if name.rpartition(".")[0] in modules and name not in view.hub.names:
            stored = view.hub.name_of(value)
            if stored is not None:
                found[name] = stored
    return found
