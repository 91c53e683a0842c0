"""Gated delta nets, by hypothesis: projections are told apart by their sizes and by which of them give the output."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rtp_kernel.ops.delta_rule import Tokens, chunked, delta_gates
from rtp_runtime.enable.blocks.delta_net import DeltaNet
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import same
from rtp_runtime.enable.recognise.mixer import Mixer, convolution_of, gated_norm
from rtp_runtime.enable.recognise.view import View, leaf, linears, rows
from rtp_runtime.enable.recording import Call

ORDERS = sorted(itertools.permutations(("q", "k", "v")), key=lambda order: order != ("q", "k", "v"))
NORM_EPS = 1e-6
BETAS: Sequence[float] = (1.0, 2.0)
"""What beta may be multiplied by: 2 lets the state be mirrored (`allow_neg_eigval`)."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """The projections of the input, by role."""

    mixed: tuple[Call, ...]
    a: Call
    b: Call
    gate: Call


def is_delta_net(view: View, name: str) -> bool:
    """Whether it holds a convolution and two parameters with one number per head."""
    module = view.module(name)
    shapes = [parameter.shape for _, parameter in module.named_parameters(recurse=False)]
    per_head = len(shapes) == 2 and shapes[0] == shapes[1] and len(shapes[0]) == 1
    return per_head and convolution_of(module) is not None and len(view.recording.calls_of(name)) == 1


@torch.no_grad()
def recognise_delta_net(view: View, name: str) -> DeltaNet:
    """The gated delta net that the module `name` is.

    Raises:
        UnrecognisedError: no choice of roles gives its output.
    """
    mixer, norm = _mixer(view, name)
    heads = next(iter(mixer.own.values())).shape[0]
    values = mixer.wanted.shape[-1]
    wanted = norm.inputs[0].reshape(-1, heads, values // heads)
    keys = (mixer.conv.weight.shape[0] - values) // 2
    for inputs in _roles(mixer, norm, heads):
        mixed = torch.cat([rows(call.outputs[0]) for call in inputs.mixed], dim=-1)
        for activation, order in itertools.product(mixer.activations(), ORDERS):
            convolved = mixer.convolved(mixed, activation)
            pieces = torch.split(convolved, [values if part == "v" else keys for part in order], dim=-1)
            parts = dict(zip(order, pieces, strict=True))
            for key_heads in (count for count in range(heads, 0, -1) if heads % count == 0 and keys % count == 0):
                for a_log, dt_bias in itertools.permutations(sorted(mixer.own)):
                    beta = _beta(mixer, inputs, parts, wanted, key_heads, a_log, dt_bias)
                    if beta is not None:
                        found = _Found(inputs, order, activation, norm, key_heads, a_log, dt_bias, beta)
                        return _block(mixer, found, (heads, keys, values))
    raise mixer.refuse("no choice of its projections gives its output.", "a component for its recurrence")


@dataclass(frozen=True, eq=False)
class _Found:
    """The choice that gives the output."""

    inputs: Inputs
    order: tuple[str, ...]
    activation: str | None
    norm: Call
    key_heads: int
    a_log: str
    dt_bias: str
    beta: float


def _block(mixer: Mixer, found: _Found, sizes: tuple[int, int, int]) -> DeltaNet:
    heads, keys, values = sizes
    inputs, key_heads = found.inputs, found.key_heads
    return DeltaNet(
        class_name=type(mixer.module).__name__,
        mixed=tuple(mixer.projection(call) for call in inputs.mixed),
        order=found.order,
        conv=mixer.conv_block(found.activation),
        a=mixer.projection(inputs.a),
        b=mixer.projection(inputs.b),
        gate=mixer.projection(inputs.gate),
        out=mixer.projection(mixer.last),
        norm=gated_norm(mixer, found.norm.module, values // heads, (1,), None),
        norm_name=leaf(found.norm.name),
        key_heads=mixer.size(key_heads, "its number of key heads", "key_heads", "attention"),
        heads=mixer.size(heads, "its number of heads", "value_heads", "attention"),
        key_dim=mixer.size(keys // key_heads, "its key dim", "key_head_dim"),
        value_dim=mixer.size(values // heads, "its value dim", "value_head_dim"),
        beta=None if found.beta == 1.0 else repr(found.beta),
        conv_parts=_conv_parts(mixer),
        a_log=found.a_log,
        dt_bias=found.dt_bias,
    )


def _conv_parts(mixer: Mixer) -> tuple[str, ...]:
    """What checkpoints call the taps of each part of the convolution, inside the block; () where it is whole there."""
    parts = mixer.view.hub.parts_of(mixer.conv.weight.detach())
    inside = tuple(part.removeprefix(f"{mixer.name}.") for part in parts if part.startswith(f"{mixer.name}."))
    return inside if len(inside) == len(ORDERS[0]) == len(parts) else ()


def _mixer(view: View, name: str) -> tuple[Mixer, Call]:
    """The module's output projection, and the norm with a gate before it."""
    call, calls = view.recording.of(name), view.recording.children(name)
    held = convolution_of(view.module(name))
    assert held is not None
    last = [c for c in linears(calls) if same(rows(c.outputs[0]), rows(call.outputs[0]))]
    first = [
        c for c in linears(calls) if c.inputs[0].shape == call.inputs[0].shape and same(c.inputs[0], call.inputs[0])
    ]
    if len(last) != 1 or not first:
        raise UnrecognisedError(view.label(name), f"{len(last)} projections give its output.", "one")
    mixer = Mixer(view, name, call, first[0], last[0], *held, 1.0)
    for norm in mixer.others():
        if len(norm.inputs) == 2 and norm.outputs and _flat_same(norm.outputs[0], mixer.wanted):
            return mixer, norm
    raise mixer.refuse("no norm with a gate is given what the rule returns.", "the steps before its output projection")


def _flat_same(found: Tensor, wanted: Tensor) -> bool:
    return found.numel() == wanted.numel() and same(found.reshape(wanted.shape), wanted)


def _roles(mixer: Mixer, norm: Call, heads: int) -> Iterator[Inputs]:
    """Choices of which projection is which."""
    x = rows(mixer.call.inputs[0])
    calls = [call for call in linears(mixer.view.recording.children(mixer.name)) if same(rows(call.inputs[0]), x)]
    gates = [call for call in calls if _flat_same(call.outputs[0], norm.inputs[1].reshape(x.shape[0], -1))]
    channels = mixer.conv.weight.shape[0]
    for gate in gates:
        rest = [call for call in calls if call is not gate]
        whole = [(call,) for call in rest if call.outputs[0].shape[-1] == channels]
        three = [
            chosen
            for chosen in itertools.permutations(rest, 3)
            if sum(call.outputs[0].shape[-1] for call in chosen) == channels
        ]
        for mixed in (*whole, *three):
            left = [call for call in rest if call not in mixed and call.outputs[0].shape[-1] == heads]
            for a, b in itertools.permutations(left, 2):
                yield Inputs(tuple(mixed), a, b, gate)


def _beta(
    mixer: Mixer, inputs: Inputs, parts: dict[str, Tensor], wanted: Tensor, key_heads: int, a_log: str, dt_bias: str
) -> float | None:
    """The factor of beta with which the rule gives what is wanted."""
    num, heads, value_dim = wanted.shape
    q, k = (parts[name].reshape(num, key_heads, -1) for name in ("q", "k"))
    a, b = rows(inputs.a.outputs[0]), rows(inputs.b.outputs[0])
    g, beta = delta_gates(a, b, mixer.own[a_log].detach(), mixer.own[dt_bias].detach())
    for factor in BETAS:
        tokens = Tokens(q, k, parts["v"].reshape(num, heads, value_dim), g, beta * factor)
        prepared = tokens.prepared(q.shape[-1] ** -0.5, NORM_EPS)
        found, _ = chunked(prepared, q.new_zeros(heads, q.shape[-1], value_dim))
        if same(found, wanted):
            return factor
    return None
