"""Writes the model file of a recognised decoder: the pieces of code that the template puts in their places."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rtp_runtime.bridge.target import installed_version
from rtp_runtime.enable.blocks import Block, ByLayer
from rtp_runtime.enable.blocks.bridge import constant, target_lines
from rtp_runtime.enable.code import assign, call, choice, literal
from rtp_runtime.enable.findings import Decoder, Kind
from rtp_runtime.enable.forward import after_lines, before_lines, layer_forward
from rtp_runtime.enable.imports import import_lines
from rtp_runtime.enable.reflow import reflow
from rtp_runtime.enable.sizes import Sizes
from rtp_runtime.enable.states import state_lines
from rtp_runtime.enable.templates import render
from rtp_runtime.enable.weights import declare

LAYERS = "for layer in range(config.num_hidden_layers)"


def write_model(decoder: Decoder, sizes: Sizes, title: str, modeling_file: str) -> str:
    """The text of the model file."""
    body = _render(decoder, sizes, title, modeling_file, imports="", pinned=[])
    pinned = pinned_keys(decoder, body)
    body = _render(decoder, sizes, title, modeling_file, imports="", pinned=pinned)
    whole = _render(decoder, sizes, title, modeling_file, imports="\n".join(import_lines(body)), pinned=pinned)
    return reflow(whole)


def pinned_keys(decoder: Decoder, body: str) -> list[tuple[str, str]]:
    """Keys that the reference reads and the model file does not, with what it was written for, as code."""
    by_bridges = {key for block in decoder.bridged for key in block.reads}
    return [
        (key, literal(value))
        for key, value in sorted(decoder.pinned.items())
        if not re.search(rf"config\.{key}\b", body) and key not in by_bridges
    ]


def _render(d: Decoder, sizes: Sizes, title: str, modeling_file: str, **more: Any) -> str:
    direct = d.state_names if _same_states(d) else ()
    return render(
        "model.py.jinja",
        d=d,
        title=title,
        modeling_file=modeling_file,
        targets=[line for name, target in d.targets.items() for line in target_lines(name, target)],
        bridge_version=installed_version() if d.targets else None,
        sources=list(_sources(d)),
        kinds=[_KindCode(d, kind, direct) for kind in d.kinds],
        signature=_signature(d, direct),
        model_init=_model_init(d, sizes),
        model_forward=_model_forward(d, direct),
        weights=declare(d),
        states=state_lines(d),
        lists=any(isinstance(value, list) for value in d.pinned.values()),
        **more,
    )


def _same_states(d: Decoder) -> bool:
    """Whether every layer has states of the same names, which are then arguments of their own."""
    return len({tuple(states) for states in d.states.values()}) == 1


def _sources(d: Decoder) -> Iterator[str]:
    """The classes of blocks, each once, as the blocks first run."""
    seen = set()
    for block in d.blocks:
        text = "\n".join(block.source())
        if text and text not in seen:
            seen.add(text)
            yield text


def _arguments(d: Decoder, direct: tuple[str, ...]) -> dict[str, str]:
    """What every layer is given beside the hidden rows -> its type."""
    types = {"position_embeddings": "tuple[Tensor, Tensor]", "batch": "ForwardBatch"}
    found = {name: kind for name, kind in types.items() if any(name in block.takes for block in d.blocks)}
    states = dict.fromkeys(direct, "StateView") if direct else {"views": "Mapping[str, StateView]"}
    return found | (states if d.state_names else {})


def _signature(d: Decoder, direct: tuple[str, ...]) -> list[str]:
    given = [f"{name}: {kind}" for name, kind in _arguments(d, direct).items()]
    return call("def forward(", ["self", "hidden: Tensor", *given], ") -> Tensor:", indent=4)


class _KindCode:
    """A layer class as the template wants it."""

    def __init__(self, d: Decoder, kind: Kind, direct: tuple[str, ...]) -> None:
        self.class_name = kind.class_name
        self.by_layer = _by_layer(kind)
        factors = {value: _attribute(code) for value, code in d.residual_factors.items()}
        used = {factor for sums in (*(step.inputs for step in kind.steps), kind.output) for factor in sums.values()}
        self.init = [line for step in kind.steps for line in _make(kind, step.name)]
        codes = [code for value, code in d.residual_factors.items() if value in used]
        self.init += [f"self.{_attribute(code)} = {code}" for code in dict.fromkeys(codes)]
        self.forward = layer_forward(kind, factors, direct, wide=d.wide_stream)


def _by_layer(kind: Kind) -> bool:
    blocks = [block for name in kind.blocks for block in kind.choices(name)]
    chosen = any(isinstance(block, ByLayer) for block in kind.blocks.values())
    return chosen or any(block.by_layer() for block in blocks)


def _make(kind: Kind, name: str) -> list[str]:
    block = kind.blocks[name]
    if isinstance(block, Block):
        return assign(f"self.{name}", [(None, block.make())], indent=8)
    return assign(f"self.{name}", [(condition, choice.make()) for condition, choice in block.cases], indent=8)


def _attribute(code: str) -> str:
    keys = re.findall(r"config\.(\w+)", code)
    return str(keys[0]) if code == f"config.{keys[0]}" else f"{keys[0]}_factor"


def _model_init(d: Decoder, sizes: Sizes) -> list[str]:
    table = ["config.vocab_size", d.embedding_dim, *([f"scale={d.embedding_scale}"] if d.embedding_scale else [])]
    lines = call(f"self.{d.embedding_name} = {d.embedding_class or 'Embedding'}(", table)
    first = [step.name for step in d.before.steps]
    for name in first:
        lines += assign(f"self.{name}", [(None, d.outer[name].make())], indent=8)
    cases = [(kind.condition, f"{kind.class_name}(config{', layer' if _by_layer(kind) else ''})") for kind in d.kinds]
    plain = len(cases) == 1 and not _by_layer(d.kinds[0])
    loop = LAYERS.replace("for layer", "for _") if plain else LAYERS
    lines.append(f"self.{d.layers_name} = nn.ModuleList({choice(cases)} {loop})")
    for name in (step.name for step in d.after.steps if step.name not in first):
        lines += assign(f"self.{name}", [(None, d.outer[name].make())], indent=8)
    lines += _tables(d, sizes)
    return lines + [
        f"self.{n} = {code}" for n, code in (("hidden_scale", d.hidden_scale), ("head_scale", d.head_scale)) if code
    ]


def _tables(d: Decoder, sizes: Sizes) -> list[str]:
    if d.rope is None:
        return []
    if d.rope.target is not None:
        return [f"self.{d.rope.name} = BridgedRotary({constant(d.rope.class_name)}, config)"]
    dim = d.rope.dim or sizes.name
    local = [] if dim.startswith("config.") else sizes.local
    if not d.rope.by_layer_type:
        wide = ["torch.float32"] if d.rope.wide else []
        return [*local, *call(f"self.{d.rope.name} = RotaryEmbedding(", [dim, d.rope.parameters, *wide])]
    tables = f"{{kind: RotaryEmbedding({dim}, rope_parameters(config, kind)) for kind in kinds}}"
    return [
        *local,
        "self.layer_types = config.layer_types",
        "kinds = sorted(set(config.layer_types))",
        *call(f"self.{d.rope.name} = nn.ModuleDict(", [tables]),
    ]


def _model_forward(d: Decoder, direct: tuple[str, ...]) -> list[str]:
    lines = before_lines(d)
    given = {name: name for name in _arguments(d, direct)} | {name: f'views["{name}"]' for name in direct}
    if d.rope and d.rope.by_layer_type:
        tables = f"{{kind: table(batch.positions) for kind, table in self.{d.rope.name}.items()}}"
        lines.append(f"position_embeddings = {tables}")
        lines.append(f"for layer, kind, views in zip(self.{d.layers_name}, self.layer_types, state, strict=True):")
        given["position_embeddings"] = "position_embeddings[kind]"
    else:
        if d.rope:
            lines.append(f"position_embeddings = self.{d.rope.name}(batch.positions)")
        lines.append(f"for layer, views in zip(self.{d.layers_name}, state, strict=True):")
    return [*lines, f"    hidden = layer({', '.join(['hidden', *given.values()])})", *after_lines(d)]
