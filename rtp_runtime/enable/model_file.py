"""Writes the model file of a recognised decoder: the pieces of code that the template puts in their places."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rtp_runtime.enable.code import call, from_import, literal
from rtp_runtime.enable.declarations import axes, fused_tensors, merged_name, states, weights
from rtp_runtime.enable.findings import Attention, Decoder, Mlp, Norm, Projection
from rtp_runtime.enable.forward import layer_forward
from rtp_runtime.enable.sizes import Sizes
from rtp_runtime.enable.templates import render

KERNEL = "rtp_kernel.components"


def write_model(decoder: Decoder, sizes: Sizes, title: str, modeling_file: str) -> str:
    """The text of the model file."""
    body = _render(decoder, sizes, title, modeling_file, imports="", pinned=[])
    pinned = pinned_keys(decoder, body)
    body = _render(decoder, sizes, title, modeling_file, imports="", pinned=pinned)
    return _render(decoder, sizes, title, modeling_file, imports="\n".join(_imports(body)), pinned=pinned)


def pinned_keys(decoder: Decoder, body: str) -> list[tuple[str, str]]:
    """Keys that the reference reads and the model file does not, with what it was written for, as code."""
    return [(key, literal(value)) for key, value in sorted(decoder.pinned.items()) if f"config.{key}" not in body]


def _render(d: Decoder, sizes: Sizes, title: str, modeling_file: str, **more: Any) -> str:
    by_layer = any(part is not None for part in (d.per_layer.window_if, d.per_layer.rotary_if))
    own_mlp = not _is_component(d.mlp)
    return render(
        "model.py.jinja",
        d=d,
        title=title,
        modeling_file=modeling_file,
        head_dim=sizes.head_dim,
        kv_heads=sizes.kv_heads,
        attention_by_layer=by_layer,
        norm=_norm,
        projections=_projections(d.attention),
        attn=_attn(d, sizes),
        attention_forward=_attention_forward(d),
        mlp_class=own_mlp,
        mlp_init=_mlp_init(d.mlp) if own_mlp else [],
        mlp_forward=_mlp_forward(d.mlp) if own_mlp else [],
        activation=d.mlp.activation,
        layer_init=_layer_init(d, by_layer),
        layer_forward=layer_forward(d.layer, {value: _attribute(code) for value, code in d.residual_factors.items()}),
        model_init=_model_init(d, sizes, by_layer),
        model_forward=_model_forward(d),
        fused=fused_tensors(d),
        weights=weights(d),
        axes=axes(d, sizes),
        states=states(d, sizes),
        lists=any(isinstance(value, list) for value in d.pinned.values()),
        **more,
    )


def _norm(norm: Norm, dim: str) -> str:
    kind = "RMSNorm" if norm.kind == "rms" else "LayerNorm"
    more = ", offset=1.0" if norm.offset else ", bias=False" if norm.kind == "layer" and not norm.bias else ""
    more += "" if norm.weight else ", weight=False"
    return f"{kind}({dim}, {norm.eps}{more})"


def _bias(projection: Projection) -> str:
    return ", bias=True" if projection.bias else ""


def _is_component(mlp: Mlp) -> bool:
    """Whether GatedMLP says it all: gated, with its names and its single bias."""
    biases = {part.bias for part in (mlp.gate, mlp.up, mlp.down) if part is not None}
    names = mlp.fused and mlp.up.name == "gate_up_proj" and mlp.gate is not None and mlp.gate.start == 0
    apart = mlp.gate is not None and (mlp.gate.name, mlp.up.name) == ("gate_proj", "up_proj")
    return (names or apart) and mlp.down.name == "down_proj" and len(biases) == 1


def _projections(attention: Attention) -> list[str]:
    names = (
        ("q_proj", "k_proj", "v_proj") if attention.fused else (attention.q.name, attention.k.name, attention.v.name)
    )
    parts = ", ".join(f'"{name}": {size}' for name, size in zip(names, ("q_size", "kv_size", "kv_size"), strict=True))
    biased = ["bias=True"] if attention.q.bias else []
    lines = call(f"self.{merged_name(attention)} = MergedLinear(", ["config.hidden_size", f"{{{parts}}}", *biased])
    return [*lines, f"self.{attention.out.name} = Linear(q_size, config.hidden_size{_bias(attention.out)})"]


def _attn(d: Decoder, sizes: Sizes) -> str:
    window = d.per_layer.window
    if window and d.per_layer.window_if:
        window = f"{window} if {d.per_layer.window_if} else None"
    options = {"scale": d.attention.scale, "window": window, "soft_cap": d.attention.soft_cap}
    arguments = ["config.num_attention_heads", sizes.kv_heads, "self.head_dim"]
    arguments += [f"{name}={code}" for name, code in options.items() if code]
    arguments += ["sinks=True"] if d.attention.sinks else []
    return "\n        ".join(call("self.attn = Attention(", arguments))


def _attention_forward(d: Decoder) -> list[str]:
    a = d.attention
    split = "(part.unflatten(-1, (-1, self.head_dim)) for part in "
    shapes = "  # [tokens, heads, dim]"
    q, k = "q", "k"
    if a.norm and a.norm_flat:
        lines = [
            f"q, k, v = self.{merged_name(a)}(hidden)  # [tokens, heads * dim]",
            f"q, k = self.{a.q_norm}(q), self.{a.k_norm}(k)",
            f"q, k, v = {split}(q, k, v)){shapes}",
        ]
    else:
        lines = [f"q, k, v = {split}self.{merged_name(a)}(hidden)){shapes}"]
        if a.norm and not a.norm_after_rotary:
            q, k = f"self.{a.q_norm}(q)", f"self.{a.k_norm}(k)"
    if d.rope and d.per_layer.rotary_if:
        if q != "q":
            lines.append(f"q, k = {q}, {k}")
        lines += ["if self.rotary is not None:", "    q, k = self.rotary(q, k, *position_embeddings)"]
    elif d.rope:
        lines.append(f"q, k = self.rotary({q}, {k}, *position_embeddings)")
    elif q != "q":
        lines.append(f"q, k = {q}, {k}")
    if a.norm and a.norm_after_rotary:
        lines.append(f"q, k = self.{a.q_norm}(q), self.{a.k_norm}(k)")
    return lines


def _mlp_init(mlp: Mlp) -> list[str]:
    if mlp.gate is None:
        first = [f"self.{mlp.up.name} = Linear(config.hidden_size, {mlp.width}{_bias(mlp.up)})"]
    else:
        parts = f'{{"{mlp.gate.name}": {mlp.width}, "{mlp.up.name}": {mlp.width}}}'
        biased = ["bias=True"] if mlp.up.bias else []
        first = call("self.gate_up_proj = MergedLinear(", ["config.hidden_size", parts, *biased])
    return [*first, f"self.{mlp.down.name} = Linear({mlp.width}, config.hidden_size{_bias(mlp.down)})"]


def _mlp_forward(mlp: Mlp) -> list[str]:
    if mlp.gate is None:
        inner = f"activation(self.{mlp.up.name}(hidden), self.activation)"
        return [f"output: Tensor = self.{mlp.down.name}({inner})"]
    return [
        "gate, up = self.gate_up_proj(hidden)",
        f"output: Tensor = self.{mlp.down.name}(gated_activation(gate, up, self.activation))",
    ]


def _layer_init(d: Decoder, by_layer: bool) -> list[str]:
    """Modules in the order in which they run."""
    lines = []
    for step in d.layer.steps:
        if step.name == d.layer.attention_name:
            made = f"{d.attention.class_name}(config{', layer' if by_layer else ''})"
        elif step.name == d.layer.mlp_name and _is_component(d.mlp):
            bias = ", bias=True" if d.mlp.up.bias else ""
            made = f"GatedMLP(config.hidden_size, {d.mlp.width}, {d.mlp.activation}{bias})"
        elif step.name == d.layer.mlp_name:
            made = f"{d.mlp.class_name}(config)"
        else:
            made = _norm(d.layer.norms[step.name], "config.hidden_size")
        lines.append(f"self.{step.name} = {made}")
    return lines + [f"self.{_attribute(code)} = {code}" for code in dict.fromkeys(d.residual_factors.values())]


def _attribute(code: str) -> str:
    keys = re.findall(r"config\.(\w+)", code)
    return str(keys[0]) if code == f"config.{keys[0]}" else f"{keys[0]}_factor"


def _model_init(d: Decoder, sizes: Sizes, by_layer: bool) -> list[str]:
    table = ["config.vocab_size", "config.hidden_size", *([f"scale={d.embedding_scale}"] if d.embedding_scale else [])]
    lines = call(f"self.{d.embedding_name} = {d.embedding_class or 'Embedding'}(", table)
    layer = f"{d.layer.class_name}(config{', layer' if by_layer else ''}) for "
    layer += f"{'layer' if by_layer else '_'} in range(config.num_hidden_layers)"
    lines += call(f"self.{d.layers_name} = nn.ModuleList(", [layer])
    lines.append(f"self.{d.norm_name} = {_norm(d.final_norm, 'config.hidden_size')}")
    if d.rope:
        lines += sizes.local
        dim = sizes.name
        if d.rope.partial:
            dim = f'int({dim} * config.rope_parameters["partial_rotary_factor"])'
        if d.rope.by_layer_type:
            lines += ["self.layer_types = config.layer_types", "kinds = sorted(set(config.layer_types))"]
            tables = f"{{kind: RotaryEmbedding({dim}, rope_parameters(config, kind)) for kind in kinds}}"
            lines += call(f"self.{d.rope.name} = nn.ModuleDict(", [tables])
        else:
            lines += call(f"self.{d.rope.name} = RotaryEmbedding(", [dim, "rope_parameters(config)"])
    return lines + ([f"self.hidden_scale = {d.hidden_scale}"] if d.hidden_scale else [])


def _model_forward(d: Decoder) -> list[str]:
    scaled = " * self.hidden_scale" if d.hidden_scale else ""
    lines = [f"hidden = self.{d.embedding_name}(batch.input_ids){scaled}  # [tokens, hidden]"]
    given = "position_embeddings"
    if d.rope and d.rope.by_layer_type:
        tables = f"{{kind: table(batch.positions) for kind, table in self.{d.rope.name}.items()}}"
        lines.append(f"position_embeddings = {tables}")
        lines.append(f"for layer, kind, views in zip(self.{d.layers_name}, self.layer_types, state, strict=True):")
        given = "position_embeddings[kind]"
    else:
        if d.rope:
            lines.append(f"position_embeddings = self.{d.rope.name}(batch.positions)")
        lines.append(f"for layer, views in zip(self.{d.layers_name}, state, strict=True):")
    return [*lines, f'    hidden = layer(hidden, {given}, batch, views["kv"])']


IMPORTS: Mapping[str, tuple[str, ...]] = {
    "rtp_kernel.batch": ("Build", "ForwardBatch", "ModelState", "StateView"),
    KERNEL: (
        "Attention",
        "Embedding",
        "GatedMLP",
        "LayerNorm",
        "Linear",
        "MergedLinear",
        "RMSNorm",
        "Rotary",
        "RotaryEmbedding",
    ),
    "rtp_kernel.ops.activation": ("activation", "gated_activation"),
    "rtp_kernel.registry": ("Support",),
    "rtp_runtime.model": ("rope_parameters",),
    "rtp_runtime.state": ("PagedState", "StateDescriptors", "WindowState"),
    "rtp_runtime.weights": (
        "Axis",
        "Concat",
        "FromCheckpoint",
        "Reshape",
        "Split",
        "Tie",
        "Weight",
        "WeightDescriptors",
    ),
}


def _imports(body: str) -> list[str]:
    """The import block: only what the file uses."""
    lines = ["from typing import Any", ""]
    if re.search(r"\btorch\.(tanh|tensor)", body):
        lines.append("import torch")
    for module, names in IMPORTS.items():
        used = [name for name in names if re.search(rf"(?<![\w.\"]){name}\b(?!\")", body)]
        # A function's name may also be an attribute or argument: what counts is a call.
        used = [name for name in used if name[0].isupper() or re.search(rf"(?<![\w.]){name}\(", body)]
        lines += from_import(module, used) if used else []
    return [*lines, "from torch import Tensor, nn"]
