"""Feed-forward blocks: which projection is the gate, and which activation stands between."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn

from rtp_kernel.ops.activation import ACTIVATIONS, xielu
from rtp_runtime.enable.blocks import Mlp, Norm, Projection
from rtp_runtime.enable.code import literal
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import express, same
from rtp_runtime.enable.recognise.norm import is_norm, recognise_norm
from rtp_runtime.enable.recognise.view import View, is_linear, leaf, linears, projection_of, rows
from rtp_runtime.enable.recording import Call


def is_mlp(view: View, name: str) -> bool:
    """Whether it holds projections that ran."""
    return bool(linears(view.recording.children(name)))


def recognise_mlp(view: View, name: str, owner: nn.Module | None = None) -> Mlp:
    """The feed-forward block `name`: down(act(gate(x)) * up(x)) or down(act(up(x))).

    `owner`: the module around it, which may have given it its width.

    Raises:
        UnrecognisedError: it is neither.
    """
    call = view.recording.of(name)
    x, children = rows(call.inputs[0]), linears(view.recording.children(name))
    first = [child for child in children if same(rows(child.inputs[0]), x)]
    last = [child for child in children if child not in first and gives(call, rows(child.outputs[0]))]
    if len(last) != 1 or len(first) + 1 != len(children):
        raise UnrecognisedError(
            view.label(name), "it is not projections, an activation and a projection.", _needs(view, name)
        )
    inner, norm = _before_norm(view, name, rows(last[0].inputs[0]))
    for gate, up, middle in _hypotheses(name, first, inner.shape[-1]):
        for activation, code, function in _activations(view, name):
            result = function(middle[0]) if gate is None else function(middle[0]) * middle[1]
            if same(result, inner):
                width = _width(view, name, inner.shape[-1], owner)
                down = projection_of(last[0], name, 0, x.shape[-1])
                return Mlp(view.class_name(name), code, up, down, gate, width, inner_norm=norm, learned=activation)
    raise UnrecognisedError(
        view.label(name), "its activation is none of ours.", f"an activation beside {', '.join(ACTIVATIONS)}"
    )


def _before_norm(view: View, name: str, inner: Tensor) -> tuple[Tensor, tuple[str, Norm] | None]:
    """What the last projection is given, and the norm that stands right before it: then what that is given."""
    for child in view.recording.children(name):
        if is_linear(child.module) or hasattr(child.module, "alpha_p") or not is_norm(view, child.name):
            continue
        if not child.outputs or not any(True for _ in child.module.parameters()):
            continue
        if child.inputs[0].shape == child.outputs[0].shape and same(rows(child.outputs[0]), inner):
            return rows(child.inputs[0]), (leaf(child.name), recognise_norm(view, child.name))
    return inner, None


def _activations(view: View, name: str) -> Iterator[tuple[str | None, str, Callable[[Tensor], Tensor]]]:
    """Activations as (the module of one that is learned, code, function)."""
    for key, function in ACTIVATIONS.items():
        yield None, activation_code(view, name, key), function
    for part, module in view.module(name).named_children():
        if all(hasattr(module, key) for key in ("alpha_p", "alpha_n", "beta", "eps")):
            values = tuple(getattr(module, key).detach().float() for key in ("alpha_p", "alpha_n", "beta", "eps"))
            yield part, "xielu", lambda x, values=values: xielu(x, *values)  # type: ignore[misc]


def _width(view: View, name: str, width: int, owner: nn.Module | None) -> str:
    """By the keys that its own class reads, then by those of the classes that may have made it."""
    layer = view.module(name.rpartition(".")[0])
    own = view.keys_of(view.module(name))
    around = view.keys_of(owner) if owner is not None else []
    more = [*around, *view.keys_of(layer)]
    for keys in (_widths(around), _widths(own), _widths([*own, *more]), own, [*own, *more]):
        found = express(width, view.config, keys)
        if found is not None:
            return found.code
    return view.express(width, [*own, *more, "hidden_size"], view.label(name), "its inner width").code


def _widths(keys: Iterable[str]) -> list[str]:
    """Those whose names say that they are inner widths, which come before equal or related numbers of other keys."""
    return [key for key in keys if re.search("intermediate|ffn|inner|shared", key)]


def gives(call: Call, out: Tensor) -> bool:
    """Whether a module's result is `out`, perhaps with a residual that it was handed added to it."""
    result = rows(call.outputs[0])
    return same(out, result) or any(
        part.numel() == out.numel() and same(out + rows(part), result) for part in call.inputs[1:]
    )


def _hypotheses(
    name: str, first: list[Call], size: int
) -> list[tuple[Projection | None, Projection, tuple[Tensor, ...]]]:
    outputs = [rows(call.outputs[0]) for call in first]
    if len(outputs) == 1 and outputs[0].shape[-1] == size:
        return [(None, projection_of(first[0], name, 0, size), (outputs[0],))]
    if len(outputs) == 1 and outputs[0].shape[-1] == 2 * size:
        out = outputs[0]
        halves = [projection_of(first[0], name, start, size, whole=False) for start in (0, size)]
        first_half, second_half = out[:, :size], out[:, size:]
        return [(halves[0], halves[1], (first_half, second_half)), (halves[1], halves[0], (second_half, first_half))]
    if len(outputs) == 2:
        parts = [projection_of(call, name, 0, size) for call in first]
        return [(parts[0], parts[1], (outputs[0], outputs[1])), (parts[1], parts[0], (outputs[1], outputs[0]))]
    return []


def activation_code(view: View, name: str, found: str) -> str:
    """The config key that names an activation which computes the same, or the name itself."""
    for key in sorted(view.keys_of(view.module(name))):
        value = getattr(view.config, key, None)
        if isinstance(value, str) and ACTIVATIONS.get(value) is ACTIVATIONS[found]:
            return f"config.{key}"
    return literal(found)


def _needs(view: View, name: str) -> str:
    inside = {type(module).__name__ for module in view.module(name).modules() if module is not view.module(name)}
    return f"components for what it holds: {', '.join(sorted(inside))}"
