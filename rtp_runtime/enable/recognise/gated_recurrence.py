"""Recurrent blocks of Griffin: each choice of parameters is run until one gives what the recurrence returned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rtp_kernel.ops.activation import ACTIVATIONS
from rtp_kernel.ops.linear_recurrence import scanned
from rtp_runtime.enable.blocks.gated_recurrence import GatedRecurrence
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import same
from rtp_runtime.enable.recognise.mixer import Mixer, convolution_of, size_code
from rtp_runtime.enable.recognise.mlp import activation_code
from rtp_runtime.enable.recognise.view import View, leaf, linears, rows
from rtp_runtime.enable.recording import Call

FACTORS = (-8.0, -1.0)


@dataclass(frozen=True, eq=False)
class Gates:
    """Names of the parameters of a recurrence, by role."""

    rate: str
    input_gate: tuple[str, str]
    decay_gate: tuple[str, str]


def is_gated_recurrence(view: View, name: str) -> bool:
    """Whether it holds a convolution, and a module inside holds matrices per head."""
    return convolution_of(view.module(name)) is not None and _cell(view, name) is not None


def _cell(view: View, name: str) -> Call | None:
    for call in view.recording.children(name):
        shapes = sorted(len(parameter.shape) for _, parameter in call.module.named_parameters(recurse=False))
        if shapes == [1, 2, 2, 3, 3]:
            return call
    return None


@torch.no_grad()
def recognise_gated_recurrence(view: View, name: str) -> GatedRecurrence:
    """The recurrent block that the module `name` is.

    Raises:
        UnrecognisedError: it computes something else.
    """
    cell = _cell(view, name)
    assert cell is not None
    mixer, gate, activation, conv_activation = _around(view, name, cell)
    x, wanted = rows(cell.inputs[0]), rows(cell.outputs[0])
    for gates, factor in itertools.product(_gates(cell.module), FACTORS):
        if same(_recurred(cell.module, gates, factor, x), wanted):
            width = mixer.size(x.shape[-1], "its width", "width")
            return GatedRecurrence(
                class_name=type(mixer.module).__name__,
                cell_class=type(cell.module).__name__,
                cell=leaf(cell.name),
                x_proj=mixer.projection(mixer.first),
                gate_proj=mixer.projection(gate),
                conv=mixer.conv_block(conv_activation),
                out_proj=mixer.projection(mixer.last),
                width=width,
                heads=_heads(view, cell, gates),
                activation=activation_code(view, name, activation),
                rate=gates.rate,
                input_gate=gates.input_gate,
                decay_gate=gates.decay_gate,
                factor=repr(factor),
            )
    raise mixer.refuse("no choice of its parameters gives what its recurrence returned.", "a component for it")


def _around(view: View, name: str, cell: Call) -> tuple[Mixer, Call, str, str | None]:
    """The projections, the gate's projection, its activation, and that of the convolution."""
    call, calls = view.recording.of(name), linears(view.recording.children(name))
    held = convolution_of(view.module(name))
    assert held is not None
    last = [c for c in calls if same(rows(c.outputs[0]), rows(call.outputs[0]))]
    first = [c for c in calls if same(rows(c.inputs[0]), rows(call.inputs[0]))]
    if len(last) == 1 and len(first) == 2:
        for x, gate in (first, first[::-1]):
            mixer = Mixer(view, name, call, x, last[0], *held, 1.0)
            for conv_activation in mixer.activations():
                if not same(mixer.convolved(mixer.projected, conv_activation), rows(cell.inputs[0])):
                    continue
                for activation, function in ACTIVATIONS.items():
                    if same(function(rows(gate.outputs[0])) * rows(cell.outputs[0]), mixer.wanted):
                        return mixer, gate, activation, conv_activation
    raise UnrecognisedError(
        view.label(name), "it is not a recurrence after a convolution, beside a gate.", "a component for it"
    )


def _gates(module: nn.Module) -> Iterator[Gates]:
    by_axes: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(recurse=False):
        by_axes.setdefault(parameter.ndim, []).append(name)
    for weights in itertools.permutations(by_axes[3]):
        for biases in itertools.permutations(by_axes[2]):
            yield Gates(by_axes[1][0], (weights[0], biases[0]), (weights[1], biases[1]))


def _recurred(module: nn.Module, gates: Gates, factor: float, x: Tensor) -> Tensor:
    held = {name: parameter.detach() for name, parameter in module.named_parameters()}
    heads = held[gates.input_gate[0]].shape[0]
    by_head = x.view(len(x), heads, -1).transpose(0, 1)

    def gate(names: tuple[str, str]) -> Tensor:
        out = torch.baddbmm(held[names[1]].unsqueeze(1), by_head, held[names[0]])
        return torch.sigmoid(out).transpose(0, 1).reshape(x.shape)

    log_decay = factor * gate(gates.decay_gate) * functional.softplus(held[gates.rate])
    scale = torch.sqrt(1 - torch.exp(2 * log_decay))
    scale[0] = 1
    return scanned(x * gate(gates.input_gate) * scale, torch.exp(log_decay), torch.zeros_like(x[0]))


def _heads(view: View, cell: Call, gates: Gates) -> str:
    """Code of the number of heads, from the keys that the recurrence reads."""
    heads = cell.module.get_parameter(gates.input_gate[0]).shape[0]
    return size_code(view, cell.name, heads, "its number of heads", "heads")
