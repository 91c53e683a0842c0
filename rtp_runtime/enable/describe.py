"""What was recognised, in words."""

from __future__ import annotations

from rtp_runtime.enable.findings import Attention, Decoder, Layer, Mlp, Norm


def describe(decoder: Decoder) -> list[str]:
    """A line for each part, with the names it has in the reference."""
    d = decoder
    lines = [
        f"layer ({d.layer.class_name}): {_order(d.layer)}",
        f"norms: {_norm(next(iter(d.layer.norms.values()), d.final_norm))}; final {_norm(d.final_norm)}",
        f"attention ({d.attention.class_name}): {_attention(d.attention, d)}",
        f"feed-forward ({d.mlp.class_name}): {_mlp(d.mlp)}",
    ]
    if d.rope is not None:
        share = "the leading part of each head" if d.rope.partial else "whole heads"
        where = f", only where {d.per_layer.rotary_if}" if d.per_layer.rotary_if else ""
        tables = ", a table per layer type" if d.rope.by_layer_type else ""
        lines.append(f"rotary ({d.rope.class_name}): layout {d.rope.layout}, {share}{tables}{where}")
    scales = [("embedding", d.embedding_scale or d.hidden_scale), ("logits", d.logit_scale)]
    more = [f"{name} times {code}" for name, code in scales if code]
    more += [f"logits capped at {d.logit_soft_cap}"] if d.logit_soft_cap else []
    lines.append("; ".join([f"head: {'tied to the embedding' if d.tied else 'its own weights'}", *more]))
    return lines


def _order(layer: Layer) -> str:
    blocks = [step.name for step in layer.steps]
    factors = " with scaled branches" if any(f != 1.0 for f in layer.output.values()) else ""
    parallel = any(set(step.inputs) == set(layer.steps[0].inputs) and len(step.inputs) == 1 for step in layer.steps[1:])
    return f"{' → '.join(blocks)}, residual sums{factors}{' in parallel' if parallel else ''}"


def _norm(norm: Norm) -> str:
    kind = "RMSNorm" if norm.kind == "rms" else "LayerNorm"
    weight = " (1 + w)" if norm.offset else " with bias" if norm.bias else "" if norm.weight else " without weight"
    return f"{kind}{weight}, eps {norm.eps}"


def _attention(a: Attention, d: Decoder) -> str:
    parts = ["grouped heads, q/k/v in one tensor" if a.fused else "grouped heads"]
    if biased := [p.name for p in (a.q, a.k, a.v, a.out) if p.bias]:
        parts.append(f"biases on {', '.join(dict.fromkeys(biased))}")
    if a.norm is not None:
        parts.append(f"{_norm(a.norm)} on q and k, {'all heads at once' if a.norm_flat else 'per head'}")
    parts.append(f"scale {a.scale or 'head_dim**-0.5'}")
    if d.per_layer.window:
        parts.append(f"window {d.per_layer.window}{' where ' + d.per_layer.window_if if d.per_layer.window_if else ''}")
    parts += [f"scores capped at {a.soft_cap}"] if a.soft_cap else []
    return ", ".join(parts + (["sinks"] if a.sinks else []))


def _mlp(mlp: Mlp) -> str:
    form = f"{mlp.down.name}({mlp.activation}({mlp.up.name}))"
    if mlp.gate is not None:
        names = "halves of " + mlp.up.name if mlp.fused else f"{mlp.gate.name} and {mlp.up.name}"
        form = f"gated by {mlp.activation}, {names}"
    return form + (", with biases" if mlp.up.bias or mlp.down.bias else "")
