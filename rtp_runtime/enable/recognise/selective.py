"""Mixers with a state space per channel (Mamba): each order of their parts is run until one gives the output."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from rtp_kernel.ops.norm import rms_norm
from rtp_kernel.ops.selective_scan import Channels, scanned
from rtp_runtime.enable.blocks import Norm, Projection
from rtp_runtime.enable.blocks.state_space import Selective
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import same
from rtp_runtime.enable.recognise.mixer import Mixer, find_mixer, has_convolution
from rtp_runtime.enable.recognise.norm import eps_code, eps_values, recognise_norm
from rtp_runtime.enable.recognise.view import View, leaf, linears, rows
from rtp_runtime.enable.recording import Call

ORDERS = sorted(itertools.permutations(("dt", "b", "c")), key=lambda order: order != ("dt", "b", "c"))


def is_selective(view: View, name: str) -> bool:
    """Whether it holds a convolution, and parameters per channel and state."""
    shapes = sorted(len(parameter.shape) for _, parameter in view.module(name).named_parameters(recurse=False))
    return has_convolution(view, name) and shapes == [1, 2]


@torch.no_grad()
def recognise_selective(view: View, name: str) -> Selective:
    """The selective state space that the module `name` is.

    Raises:
        UnrecognisedError: no order of its parts gives its output.
    """
    mixer = find_mixer(view, name)
    a_log, skip = sorted(mixer.own, key=lambda key: -mixer.own[key].ndim)
    inner, state_size = mixer.own[a_log].shape
    halves, activation, x, gate, x_call = _convolved(mixer, inner)
    dt_name, dt_proj = _step_projection(mixer, inner, x_call)
    norms = _norms(mixer)
    for order in ORDERS:
        parts = _parts(mixer, x_call, order, dt_proj.in_features, state_size)
        found = _normed(mixer, parts, norms)
        fixed = Channels(-mixer.own[a_log].exp(), mixer.own[skip].detach(), 0.0)
        step = functional.linear(parts["dt"], dt_proj.weight, dt_proj.bias)
        tokens = (x, step, parts["b"], parts["c"], gate)
        if found is not None and same(scanned(tokens, fixed, x.new_zeros(inner, state_size))[0], mixer.wanted):
            return Selective(
                class_name=type(mixer.module).__name__,
                in_proj=mixer.projection(mixer.first),
                conv=mixer.conv_block(activation),
                x_proj=mixer.projection(x_call),
                dt_proj=Projection(dt_name, dt_proj.bias is not None),
                out_proj=mixer.projection(mixer.last),
                inner=mixer.size(inner, "its inner width", "intermediate"),
                rank=mixer.size(dt_proj.in_features, "the rank of its step", "rank"),
                state_size=mixer.size(state_size, "its state size", "state"),
                halves=halves,
                order=order,
                norms=found,
                a_log=a_log,
                skip=skip,
            )
    raise mixer.refuse("no order of its parts gives its output.", "a component for its recurrence")


def _convolved(mixer: Mixer, inner: int) -> tuple[tuple[str, str], str | None, Tensor, Tensor, Call]:
    """Order of halves, activation, the convolved half, the gate, and the projection that is given the former."""
    if mixer.projected.shape[-1] != 2 * inner or mixer.factor != 1.0:
        raise mixer.refuse("its projection is not what is convolved and a gate.", "that packing")
    first, second = mixer.projected.chunk(2, dim=-1)
    for activation in mixer.activations():
        for halves, x, gate in ((("x", "gate"), first, second), (("gate", "x"), second, first)):
            x = mixer.convolved(x, activation)
            for call in linears(mixer.others()):
                if same(rows(call.inputs[0]), x):
                    return halves, activation, x, gate, call
    raise mixer.refuse("no projection is given what comes out of its convolution.", "a component for it")


def _step_projection(mixer: Mixer, inner: int, x_call: Call) -> tuple[str, nn.Linear]:
    """The linear module from a low rank to the channels; the reference may use its weight without calling it."""
    taken = (mixer.first.module, mixer.last.module, x_call.module)
    for name, child in mixer.module.named_children():
        if isinstance(child, nn.Linear) and child not in taken and child.out_features == inner:
            return name, child
    raise mixer.refuse("it has no projection of its steps to all channels.", "a component for it")


def _parts(mixer: Mixer, call: Call, order: tuple[str, ...], rank: int, state_size: int) -> dict[str, Tensor]:
    sizes = [rank if part == "dt" else state_size for part in order]
    if sum(sizes) != call.outputs[0].shape[-1]:
        raise mixer.refuse("its second projection is not a step, B and C.", "that packing")
    return dict(zip(order, torch.split(rows(call.outputs[0]), sizes, dim=-1), strict=True))


def _norms(mixer: Mixer) -> list[Call]:
    """Calls of norms of a part."""
    return [call for call in mixer.others() if not isinstance(call.module, nn.Linear) and not _passes(call)]


def _passes(call: Call) -> bool:
    """Activations, dropout, identities."""
    return not list(call.module.parameters()) and not list(call.module.buffers()) and not _has_eps(call.module)


def _has_eps(module: nn.Module) -> bool:
    return any("eps" in key for key in vars(module))


def _normed(mixer: Mixer, parts: dict[str, Tensor], calls: list[Call]) -> tuple[tuple[str, str, Norm], ...] | None:
    """The norm of each part, whose value in `parts` is replaced; None where a norm is given something else."""
    found = []
    for call in calls:
        part = next((name for name, value in parts.items() if same(value, rows(call.inputs[0]))), None)
        if part is None:
            return None
        found.append((part, leaf(call.name), norm_of(mixer.view, call)))
        parts[part] = rows(call.outputs[0])
    return tuple(found)


def norm_of(view: View, call: Call) -> Norm:
    """A norm inside a mixer, which may hold a weight of ones that no checkpoint has."""
    try:
        return recognise_norm(view, call.name)
    except UnrecognisedError:
        x = torch.randn(1, 64, call.inputs[0].shape[-1], generator=torch.Generator().manual_seed(1)) * 1e-3
        wanted = call.module(x)
        for eps in _weightless(view, call.module):
            if same(rms_norm(x, None, eps), wanted):
                return Norm("rms", eps_code(view, eps), weight=False)
        raise


def _weightless(view: View, module: nn.Module) -> Iterator[float]:
    if not list(module.parameters()):
        yield from eps_values(view, module)
