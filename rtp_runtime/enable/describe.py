"""What was recognised, in words."""

from __future__ import annotations

from rtp_runtime.enable.blocks import Attention, Norm, code_of
from rtp_runtime.enable.findings import Decoder, Kind, Rope


def describe(decoder: Decoder) -> list[str]:
    """A line for each part, with the names it has in the reference."""
    d = decoder
    norms = [part.block for part in d.parts if isinstance(part.block, Norm)]
    lines = [
        f"layer ({kind.class_name}{f', where {kind.condition}' if kind.condition else ''}): {_order(kind)}"
        for kind in d.kinds
    ]
    if norms:
        lines.append(f"norms: {norms[0].describe()}")
    lines += [f"{name}, beside the layers: {block.describe()}" for name, block in d.outer.items()]
    for part in d.parts:
        if not isinstance(part.block, Norm):
            where = f", where {part.condition}" if part.condition else ""
            word = part.block.word.replace("_", "-")
            lines.append(f"{word} ({part.block.class_name}{where}): {part.block.describe()}")
    if d.rope is not None:
        lines.append(_rotary(d, d.rope))
    scales = [("embedding", d.embedding_scale or d.hidden_scale), ("logits", d.logit_scale)]
    more = [f"{name} times {code}" for name, code in scales if code]
    more += [f"logits capped at {d.logit_soft_cap}"] if d.logit_soft_cap else []
    lines.append("; ".join([f"head: {'tied to the embedding' if d.tied else 'its own weights'}", *more]))
    return lines


def _order(kind: Kind) -> str:
    blocks = [step.name for step in kind.steps]
    factors = " with scaled branches" if any(f != 1.0 for f in kind.output.values()) else ""
    first = set(kind.steps[0].inputs)
    parallel = any(set(step.inputs) == first and len(step.inputs) == 1 for step in kind.steps[1:])
    return f"{' → '.join(blocks)}, residual sums{factors}{' in parallel' if parallel else ''}"


def _rotary(d: Decoder, rope: Rope) -> str:
    if rope.target is not None:
        return f"bridged: transformers' own rotary tables ({rope.class_name})"
    turned = [code_of(block.rotary) for block in d.blocks if isinstance(block, Attention)]
    share = "the leading part of each head" if rope.dim else "whole heads"
    tables = ", a table per layer type" if rope.by_layer_type else ""
    return f"rotary ({rope.class_name}): {next(filter(None, turned))}, {share}{tables}"
