"""Mixtures of experts, from the ids and weights that reach the experts back to the router."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from rtp_kernel.ops.activation import ACTIVATIONS, OAI_ALPHA
from rtp_kernel.ops.moe import experts as compute
from rtp_runtime.enable.blocks import Mlp, MoE, RoutedExperts, Shared
from rtp_runtime.enable.code import literal
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import combination, same
from rtp_runtime.enable.recognise.mlp import activation_code, recognise_mlp
from rtp_runtime.enable.recognise.router import Routing, recognise_router
from rtp_runtime.enable.recognise.view import View, leaf, rows
from rtp_runtime.enable.recording import Call

LOUD = 40.0
"""Factor of inputs at which gates are well beyond any limit."""


def is_moe(view: View, name: str) -> bool:
    """Whether a module inside was given ids and weights of experts for each token."""
    return _experts_call(view, name) is not None


def _experts_call(view: View, name: str) -> tuple[Call, Routing] | None:
    for call in view.recording.children(name):
        ids = [x for x in call.inputs if not x.is_floating_point() and x.ndim == 2]
        if len(ids) == 1 and call.inputs[0].is_floating_point():
            weights = [x for x in call.inputs[1:] if x.is_floating_point() and x.shape == ids[0].shape]
            if len(weights) == 1:
                return call, Routing(rows(call.inputs[0]), ids[0], weights[0].float())
    return None


def recognise_moe(view: View, name: str) -> MoE:
    """The mixture of experts `name`.

    Raises:
        UnrecognisedError: a part of it is not one of ours, named.
    """
    found = _experts_call(view, name)
    assert found is not None
    call, routing = found
    whole = view.recording.of(name)
    if not same(routing.x, rows(whole.inputs[0])):
        raise UnrecognisedError(view.label(name), "its experts are given something else than it is.", "that step")
    experts = _experts(view, name, call, routing)
    router = recognise_router(view, name, leaf(call.name), routing)
    shared, values = _shared(view, name, {leaf(call.name), router.name})
    values[experts.name] = rows(call.outputs[0])
    factors = combination(rows(whole.outputs[0]), values)
    if factors is None or set(factors) != set(values):
        raise UnrecognisedError(
            view.label(name), f"its output is no sum of {', '.join(values)}.", "the steps between written by hand"
        )
    keys = view.keys_of(view.module(name))
    codes = tuple(
        (part, view.express(factor, keys, view.label(name), "a factor of its sum").code)
        for part, factor in factors.items()
        if factor != 1.0
    )
    return MoE(type(view.module(name)).__name__, router, experts, tuple(shared), codes)


def _shared(view: View, name: str, known: set[str]) -> tuple[list[Shared], dict[str, Tensor]]:
    """The other blocks inside, and what each adds to the sum."""
    shared, values = [], {}
    others = [call for call in view.recording.children(name) if leaf(call.name) not in known]
    gates = [call for call in others if isinstance(call.module, nn.Linear) and call.outputs[0].shape[-1] == 1]
    for call in others:
        if call in gates or not list(call.module.parameters()):
            continue
        mlp: Mlp = recognise_mlp(view, call.name, view.module(name))
        gate = gates[0] if gates else None
        value = rows(call.outputs[0])
        if gate is not None:
            value = value * torch.sigmoid(rows(gate.outputs[0]))
        shared.append(Shared(leaf(call.name), mlp, leaf(gate.name) if gate else None))
        values[leaf(call.name)] = value
    return shared, values


def _experts(view: View, name: str, call: Call, routing: Routing) -> RoutedExperts:
    parameters = {inside: parameter.detach() for inside, parameter in call.module.named_parameters()}
    matrices = [inside for inside, parameter in parameters.items() if parameter.ndim == 3]
    biases = [inside for inside, parameter in parameters.items() if parameter.ndim == 2]
    wanted = rows(call.outputs[0])
    if len(matrices) not in (2, 3) or len(biases) not in (0, 2) or len(matrices) + len(biases) != len(parameters):
        raise UnrecognisedError(
            view.label(call.name), f"it holds {', '.join(parameters)}.", "experts of two or three projections"
        )
    bias = [parameters[inside] for inside in biases]
    loud = _loud(call)
    for transposed, order, gate_up, down, names in _layouts(parameters, matrices, routing.x.shape[-1]):
        turned = [_ordered(bias[0], order), bias[1]] if bias else [None, None]
        for activation, limit, alpha in _activations(view, call.module):
            options: dict[str, Any] = {
                "activation": activation,
                "limit": limit,
                "alpha": alpha,
                "gate_up_bias": turned[0],
                "down_bias": turned[1],
            }
            found = compute(routing.x, routing.weights, routing.ids, gate_up, down, **options)
            if same(found, wanted) and (
                loud is None
                or same(compute(LOUD * routing.x, routing.weights, routing.ids, gate_up, down, **options), loud)
            ):
                return _facts(view, name, call, (transposed, order, names), (activation, limit, alpha), biases)
    raise UnrecognisedError(
        view.label(call.name),
        "its experts are not gated projections with one of our activations.",
        f"an activation beside {', '.join(ACTIVATIONS)}",
    )


@torch.no_grad()
def _loud(call: Call) -> Tensor | None:
    """What the experts make of large inputs, at which a clamp shows; None where they cannot be asked."""
    given = [LOUD * x if x.is_floating_point() and x.shape == call.inputs[0].shape else x for x in call.inputs]
    try:
        found = call.module(*given)
    except (RuntimeError, TypeError):
        return None
    return rows(found) if isinstance(found, Tensor) else None


def _layouts(
    parameters: dict[str, Tensor], matrices: list[str], hidden: int
) -> list[tuple[bool, str, Tensor, Tensor, tuple[tuple[str, ...], str]]]:
    """Every way to read the tensors as gate and up [E, 2 I, H], gate first, and down [E, H, I]."""
    found = []
    for *first, down_name in itertools.permutations(matrices):
        for transposed in (False, True):
            parts = [parameters[name].transpose(1, 2) if transposed else parameters[name] for name in first]
            down = parameters[down_name].transpose(1, 2) if transposed else parameters[down_name]
            inner = down.shape[2]
            wide = inner * (2 if len(parts) == 1 else 1)
            if down.shape[1] != hidden or any(part.shape[1:] != (wide, hidden) for part in parts):
                continue
            joined = torch.cat(parts, dim=1)
            for order in ("halves", "swapped", "turns") if len(parts) == 1 else ("halves",):
                found.append((transposed, order, _ordered(joined, order), down, (tuple(first), down_name)))
    return found


def _ordered(fused: Tensor, order: str) -> Tensor:
    """Gate's rows first, of a tensor [E, 2 I, …] in another order."""
    if order == "turns":
        return torch.cat((fused[:, ::2], fused[:, 1::2]), dim=1)
    return fused.roll(fused.shape[1] // 2, dims=1) if order == "swapped" else fused


def _activations(view: View, module: nn.Module) -> list[tuple[str, float | None, float]]:
    """Activations with the limits and slopes that the module could know."""
    own = [value for value in vars(module).values() if isinstance(value, float)]
    keyed = [getattr(view.config, key, None) for key in view.keys_of(module)]
    numbers = list(dict.fromkeys([*own, *(value for value in keyed if isinstance(value, float))]))
    limits: list[float | None] = [None, *(value for value in numbers if value > 0)]
    plain = [(name, limit, OAI_ALPHA) for limit in limits for name in ACTIVATIONS]
    slopes = dict.fromkeys([OAI_ALPHA, *numbers])
    return plain + [("swiglu_oai", limit, alpha) for limit in limits for alpha in slopes]


def _facts(
    view: View,
    name: str,
    call: Call,
    layout: tuple[bool, str, tuple[tuple[str, ...], str]],
    function: tuple[str, float | None, float],
    biases: list[str],
) -> RoutedExperts:
    transposed, order, (gate_up, down) = layout
    activation, limit, alpha = function
    module, label = call.module, view.label(call.name)
    keys = [*view.keys_of(module), *view.keys_of(view.module(name))]
    tensor = module.get_parameter(down)
    width = tensor.shape[1 if transposed else 2]
    options = []
    if limit is not None:
        options.append(("limit", view.number(limit, keys)))
    if activation == "swiglu_oai" and alpha != OAI_ALPHA:
        options.append(("alpha", view.number(alpha, keys)))
    return RoutedExperts(
        name=leaf(call.name),
        num_experts=view.express(tensor.shape[0], keys, label, "its number of experts", "experts$").code,
        width=view.express(width, keys, label, "its inner width", "intermediate|ffn|inner").code,
        activation=literal(activation) if activation == "swiglu_oai" else activation_code(view, call.name, activation),
        options=tuple(options),
        gate_up=gate_up,
        down=down,
        order=order,
        transposed=transposed,
        biases=(biases[0], biases[1]) if biases else None,
        per_expert=None if biases or transposed else _per_expert(view, name, module, gate_up, down, order),
    )


def _per_expert(
    view: View, name: str, module: nn.Module, gate_up: tuple[str, ...], down: str, order: str
) -> tuple[str, str, str] | None:
    """The names of each expert's tensors in checkpoints, inside a layer, when they are stored apart."""
    joined = torch.cat([module.get_parameter(part).detach() for part in gate_up], dim=1)
    gate, up = _ordered(joined, order).chunk(2, dim=1)
    patterns = [view.hub.pattern_of(list(part)) for part in (gate, up, module.get_parameter(down).detach())]
    layer = name.rpartition(".")[0] + "."
    inside = [pattern.removeprefix(layer) for pattern in patterns if pattern and pattern.startswith(layer)]
    return (inside[0], inside[1], inside[2]) if len(inside) == 3 else None
