"""Writes the two declarations of a recognised decoder: weight descriptors and state descriptors."""

from __future__ import annotations

from rtp_runtime.enable.code import INDENT, WIDTH, call, nested
from rtp_runtime.enable.findings import Attention, Decoder, Mlp, Norm, Projection
from rtp_runtime.enable.sizes import Sizes


def merged_name(attention: Attention) -> str:
    """What our fused q, k, v is called: as the reference's, where it fuses them too."""
    return attention.q.name if attention.fused else "qkv_proj"


def axes(d: Decoder, sizes: Sizes) -> list[str]:
    return [
        *sizes.local,
        *call("q_heads = Axis(", ['"q heads"', "config.num_attention_heads", sizes.name], indent=4),
        *call("kv_heads = Axis(", ['"kv heads"', sizes.kv_heads, sizes.name, "replicable=True"], indent=4),
        f'intermediate = Axis("intermediate", {d.mlp.width})',
        'vocabulary = Axis("vocab", config.vocab_size)',
    ]


def weights(d: Decoder) -> list[str]:
    base = f'"{d.model_name}.'
    lines = [f'weight({base}{d.embedding_name}.weight", vocabulary, hidden)']
    for step in d.layer.steps:
        if step.name == d.layer.attention_name:
            lines += _attention_weights(d.attention, step.name)
        elif step.name == d.layer.mlp_name:
            lines += _mlp_weights(d.mlp, step.name)
        else:
            lines += _norm_weights(f'LAYER + "{step.name}', d.layer.norms[step.name], "hidden")
    lines += _norm_weights(f"{base}{d.norm_name}", d.final_norm, "hidden")
    head = f'"{d.head_name}'
    if d.tied:
        lines.append(f'Tie({head}.weight", {base}{d.embedding_name}.weight")')
    else:
        lines.append(f'weight({head}.weight", vocabulary, hidden)')
    lines += [f'weight({head}.bias", vocabulary)'] if d.head_bias else []
    return [line for text in lines for line in f"{text},".split("\n")]


def _norm_weights(name: str, norm: Norm, dim: str) -> list[str]:
    leaves = [*(["weight"] if norm.weight else []), *(["bias"] if norm.bias else [])]
    return [f'weight({name}.{leaf}", {dim})' for leaf in leaves]


def _linear_weights(place: str, part: Projection, out: str, inner: str) -> list[str]:
    bias = [f'weight({place}.{part.name}.bias", {out})'] if part.bias else []
    return [f'weight({place}.{part.name}.weight", {out}, {inner})', *bias]


def _attention_weights(a: Attention, name: str) -> list[str]:
    place = f'LAYER + "{name}'
    lines = _merged_weights(place, f"{place}.{merged_name(a)}", _qkv(a))
    lines += _linear_weights(place, a.out, "hidden", "q_heads")
    if a.norm:
        dims = ("q_heads", "kv_heads") if a.norm_flat else ("q_heads.unit", "kv_heads.unit")
        for norm_name, dim in zip((a.q_norm, a.k_norm), dims, strict=True):
            lines += _norm_weights(f"{place}.{norm_name}", a.norm, dim)
    return lines


def _mlp_weights(mlp: Mlp, name: str) -> list[str]:
    place = f'LAYER + "{name}'
    if mlp.gate is None:
        lines = _linear_weights(place, mlp.up, "intermediate", "hidden")
    else:
        lines = _merged_weights(place, f"{place}.gate_up_proj", _gate_up(mlp))
    return lines + _linear_weights(place, mlp.down, "hidden", "intermediate")


Parts = list[tuple[Projection, str]]
"""Projections and the axes of their outputs, in the order in which they are joined."""


def _qkv(a: Attention) -> Parts:
    return [(a.q, "q_heads"), (a.k, "kv_heads"), (a.v, "kv_heads")]


def _gate_up(mlp: Mlp) -> Parts:
    return [(part, "intermediate") for part in (mlp.gate, mlp.up) if part is not None]


def fused_tensors(d: Decoder) -> list[str]:
    """Local names of checkpoint tensors that the reference itself has fused."""
    lines = []
    for place, parts, total in (
        (d.layer.attention_name, _qkv(d.attention), "q_heads.size + 2 * kv_heads.size"),
        (d.layer.mlp_name, _gate_up(d.mlp), "2 * intermediate.size"),
    ):
        for leaf, dims in _leaves(parts):
            if _is_fused(parts):
                name = f'LAYER + "{place}.{parts[0][0].name}.{leaf}"'
                lines += call(f"{_local(parts, leaf)} = FromCheckpoint(", [name, f"({total}{dims})"], indent=4)
    return lines


def _is_fused(parts: Parts) -> bool:
    return len(parts) > 1 and len({part.name for part, _ in parts}) == 1


def _leaves(parts: Parts) -> list[tuple[str, str]]:
    """Names of the parameters, each with what its shape has after the output axis."""
    return [("weight", ", hidden"), *([("bias", ",")] if parts and parts[0][0].bias else [])]


def _local(parts: Parts, leaf: str) -> str:
    return parts[0][0].name if leaf == "weight" else f"{parts[0][0].name}_bias"


def _merged_weights(place: str, merged: str, parts: Parts) -> list[str]:
    """A parameter joined from several tensors, or from runs of one, whose axes are then named."""
    lines = []
    for leaf, dims in _leaves(parts):
        sources = []
        for index, (part, axis) in enumerate(parts):
            if _is_fused(parts):
                start = " + ".join(f"{before}.size" for _, before in parts[:index]) or "0"
                sources.append(f"Reshape(Split({_local(parts, leaf)}, {start}, {axis}.size), ({axis}{dims}))")
            else:
                sources.append(f'FromCheckpoint({place}.{part.name}.{leaf}", ({axis}{dims}))')
        source = nested("source=Concat(", [nested("(", sources, indent=16)], indent=12)
        lines.append("\n".join(call("Weight(", [f'parameter={merged}.{leaf}"', source, "over=layers"], explode=True)))
    return lines


def states(d: Decoder, sizes: Sizes) -> list[str]:
    axes = ['"kv": 2', f'"kv heads": {sizes.kv_heads}', f'"head dim": {sizes.name}']
    return [*sizes.local, *call("axes = {", axes, "}", indent=4), *_kinds(d)]


def _kinds(d: Decoder) -> list[str]:
    full = 'PagedState(axes=axes, shard="kv heads")'
    if not d.per_layer.window:
        return [f'return StateDescriptors([{{"kv": {full}}} for _ in range(config.num_hidden_layers)])']
    window = f'WindowState(axes=axes, shard="kv heads", window={d.per_layer.window})'
    if not d.per_layer.window_if:
        return [
            f"sliding = {window}",
            'return StateDescriptors([{"kv": sliding} for _ in range(config.num_hidden_layers)])',
        ]
    layers = f"sliding if {d.per_layer.window_if} else full for layer in range(config.num_hidden_layers)"
    return [
        f"full = {full}",
        f"sliding = {window}",
        *_comprehension("kinds = [", layers, "]"),
        'return StateDescriptors([{"kv": kind} for kind in kinds])',
    ]


def _comprehension(head: str, body: str, tail: str) -> list[str]:
    """On one line, or broken before `for`."""
    if len(INDENT + head + body + tail) <= WIDTH:
        return [head + body + tail]
    value, _, loop = body.partition(" for ")
    return [head, INDENT + value, f"{INDENT}for {loop}", tail]
