"""Feed-forward blocks: which projection is the gate, and which activation stands between."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rtp_kernel.ops.activation import ACTIVATIONS
from rtp_runtime.enable.blocks import Mlp, Projection
from rtp_runtime.enable.code import literal
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import same
from rtp_runtime.enable.recognise.view import View, leaf, linears, rows
from rtp_runtime.enable.recording import Call


def is_mlp(view: View, name: str) -> bool:
    """Whether it holds projections that ran."""
    return bool(linears(view.recording.children(name)))


def recognise_mlp(view: View, name: str) -> Mlp:
    """The feed-forward block `name`: down(act(gate(x)) * up(x)) or down(act(up(x))).

    Raises:
        UnrecognisedError: it is neither.
    """
    call = view.recording.of(name)
    x, children = rows(call.inputs[0]), linears(view.recording.children(name))
    first = [child for child in children if same(rows(child.inputs[0]), x)]
    last = [child for child in children if child not in first and same(rows(child.outputs[0]), rows(call.outputs[0]))]
    module = view.module(name)
    if len(last) != 1 or len(first) + 1 != len(children):
        raise UnrecognisedError(
            view.label(name), "it is not projections, an activation and a projection.", _needs(view, name)
        )
    inner = rows(last[0].inputs[0])
    for gate, up, middle in _hypotheses(first, inner.shape[-1]):
        for activation, function in ACTIVATIONS.items():
            result = function(middle[0]) if gate is None else function(middle[0]) * middle[1]
            if same(result, inner):
                width = view.express(inner.shape[-1], view.keys_of(module), view.label(name), "its inner width")
                down = Projection(leaf(last[0].name), last[0].module.bias is not None, 0, x.shape[-1])
                return Mlp(type(module).__name__, _activation(view, name, activation), up, down, gate, width.code)
    raise UnrecognisedError(
        view.label(name), "its activation is none of ours.", f"an activation beside {', '.join(ACTIVATIONS)}"
    )


def _hypotheses(first: list[Call], size: int) -> list[tuple[Projection | None, Projection, tuple[Tensor, ...]]]:
    outputs = [(leaf(call.name), call.module.bias is not None, rows(call.outputs[0])) for call in first]
    if len(outputs) == 1 and outputs[0][2].shape[-1] == size:
        name, bias, out = outputs[0]
        return [(None, Projection(name, bias, 0, size), (out,))]
    if len(outputs) == 1 and outputs[0][2].shape[-1] == 2 * size:
        name, bias, out = outputs[0]
        halves = [Projection(name, bias, start, size, whole=False) for start in (0, size)]
        first_half, second_half = out[:, :size], out[:, size:]
        return [(halves[0], halves[1], (first_half, second_half)), (halves[1], halves[0], (second_half, first_half))]
    if len(outputs) == 2:
        parts = [Projection(name, bias, 0, size) for name, bias, _ in outputs]
        values = tuple(out for _, _, out in outputs)
        return [(parts[0], parts[1], (values[0], values[1])), (parts[1], parts[0], (values[1], values[0]))]
    return []


def _activation(view: View, name: str, found: str) -> str:
    """The config key that names an activation which computes the same, or the name itself."""
    functions: Mapping[str, object] = ACTIVATIONS
    for key in sorted(view.keys_of(view.module(name))):
        value = getattr(view.config, key, None)
        if isinstance(value, str) and functions.get(value) is functions[found]:
            return f"config.{key}"
    return literal(found)


def _needs(view: View, name: str) -> str:
    inside = {type(module).__name__ for module in view.module(name).modules() if module is not view.module(name)}
    return f"components for what it holds: {', '.join(sorted(inside))}"
