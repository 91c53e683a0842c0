"""Mixers with a state space per head (Mamba 2): each order of their parts is run until one gives the output."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rtp_kernel.ops.activation import ACTIVATIONS
from rtp_kernel.ops.state_space_scan import Scan, chunked
from rtp_runtime.enable.blocks.state_space import GatedNorm, StateSpace
from rtp_runtime.enable.match import close, same
from rtp_runtime.enable.recognise.mixer import Mixer, factor_code, find_mixer, gated_norm, has_convolution
from rtp_runtime.enable.recognise.mlp import activation_code
from rtp_runtime.enable.recognise.view import View, leaf, rows
from rtp_runtime.enable.recording import Call

OPEN = (0.0, math.inf)
"""Limits of a step that is not clamped."""
ORDERS = sorted(itertools.permutations(("gate", "mixed", "dt")), key=lambda order: order != ("gate", "mixed", "dt"))
MIXED = sorted(itertools.permutations(("x", "b", "c")), key=lambda order: order != ("x", "b", "c"))


@dataclass(frozen=True, eq=False)
class Held:
    """The three parameters per head, by role."""

    a_log: str
    skip: str
    dt_bias: str


@dataclass(frozen=True, eq=False)
class Guess:
    """One hypothesis of what the mixer computes."""

    order: tuple[str, ...]
    mixed: tuple[str, ...]
    activation: str | None
    groups: int
    held: Held
    limits: tuple[float, float]
    limits_code: str | None


def is_state_space(view: View, name: str) -> bool:
    """Whether it holds a convolution, and three parameters with one number per head."""
    shapes = [parameter.shape for _, parameter in view.module(name).named_parameters(recurse=False)]
    return has_convolution(view, name) and len(shapes) == 3 and len(set(shapes)) == 1 and len(shapes[0]) == 1


@torch.no_grad()
def recognise_state_space(view: View, name: str) -> StateSpace:
    """The state space of heads that the module `name` is.

    Raises:
        UnrecognisedError: no order of its parts gives its output.
    """
    mixer = find_mixer(view, name)
    norm = _norm_call(mixer)
    scales, code = _scales(mixer)
    projected = mixer.projected * scales
    for guess in _guesses(mixer):
        parts = _parts(mixer, guess, projected)
        if norm is not None and not same(parts["gate"], rows(norm.inputs[1])):
            continue
        scanned = _scanned(mixer, guess, parts)
        if norm is not None and same(scanned, rows(norm.inputs[0])):
            return _block(mixer, guess, norm, None, code)
        if norm is None:
            for activation in (found for found in mixer.activations() if found is not None):
                if same(scanned * ACTIVATIONS[activation](parts["gate"]), mixer.wanted):
                    return _block(mixer, guess, None, activation, code)
    raise mixer.refuse("no order of its parts and parameters gives its output.", "a component for its recurrence")


def _norm_call(mixer: Mixer) -> Call | None:
    """The call of a norm with a gate, whose output goes to the last projection."""
    for call in mixer.others():
        if len(call.inputs) == 2 and call.outputs and same(rows(call.outputs[0]), mixer.wanted):
            return call
    return None


def _scales(mixer: Mixer) -> tuple[Tensor, str | None]:
    """What the projection's output is multiplied by, per channel, and the config list that says so, per part."""
    width = mixer.projected.shape[-1]
    heads = next(iter(mixer.own.values())).shape[0]
    inner, channels = mixer.wanted.shape[-1], mixer.conv.weight.shape[0]
    sizes = [inner, inner, (channels - inner) // 2, (channels - inner) // 2, heads]
    for buffer in mixer.module.buffers(recurse=False):
        if buffer.numel() == width == sum(sizes) and not bool((buffer == 1).all()):
            values = [float(part.flatten()[0]) for part in torch.split(buffer.flatten(), sizes)]
            for key in mixer.view.reference.reads:
                found = _numbers(mixer.view, key)
                if len(found) == len(values) and all(map(close, found, values)):
                    return buffer.flatten(), f"config.{key}"
    return torch.ones(width), None


def _numbers(view: View, key: str) -> Sequence[float]:
    """The list of numbers under a key; none where it holds something else."""
    value = getattr(view.config, key, None)
    held = isinstance(value, list | tuple) and all(isinstance(item, int | float) for item in value)
    return value if held and value is not None else ()


def _guesses(mixer: Mixer) -> Iterator[Guess]:
    own = mixer.own
    heads = next(iter(own.values())).shape[0]
    inner, channels = mixer.wanted.shape[-1], mixer.conv.weight.shape[0]
    shared = (channels - inner) // 2
    if inner % heads or inner + channels + heads != mixer.projected.shape[-1]:
        raise mixer.refuse("its projection is not a gate, what is convolved, and a step per head.", "that packing")
    groups = [count for count in range(1, heads + 1) if heads % count == 0 and shared % count == 0]
    names = sorted(own, key=lambda name: ("log" not in name.lower(), "bias" in name))  # likely roles first
    choices = itertools.product(
        itertools.permutations(names), _limits(mixer), ORDERS, MIXED, mixer.activations(), groups
    )
    for roles, (limits, code), order, mixed, activation, count in choices:
        yield Guess(order, mixed, activation, count, Held(*roles), limits, code)


def _limits(mixer: Mixer) -> Iterator[tuple[tuple[float, float], str | None]]:
    """Ranges to which a step may be clamped: none, a pair of the config, one or two of its numbers."""
    yield OPEN, None
    config = mixer.view.config
    keys = sorted(mixer.view.keys_of(mixer.module))
    for key in keys:
        pair = _numbers(mixer.view, key)
        if len(pair) == 2:
            yield (pair[0], pair[1]), f"config.{key}"
    numbers = {key: value for key in keys if "time_step" in key and isinstance(value := getattr(config, key), float)}
    for key, low in numbers.items():
        yield (low, math.inf), f'(config.{key}, float("inf"))'
        for other, high in numbers.items():
            if low < high:
                yield (low, high), f"(config.{key}, config.{other})"


def _parts(mixer: Mixer, guess: Guess, projected: Tensor) -> dict[str, Tensor]:
    inner, channels = mixer.wanted.shape[-1], mixer.conv.weight.shape[0]
    sizes = {"gate": inner, "mixed": channels, "dt": projected.shape[-1] - inner - channels}
    parts = dict(zip(guess.order, torch.split(projected, [sizes[part] for part in guess.order], dim=-1), strict=True))
    mixed = mixer.convolved(parts["mixed"], guess.activation)
    sizes = {"x": inner, "b": (channels - inner) // 2, "c": (channels - inner) // 2}
    return parts | dict(
        zip(guess.mixed, torch.split(mixed, [sizes[part] for part in guess.mixed], dim=-1), strict=True)
    )


def _scanned(mixer: Mixer, guess: Guess, parts: dict[str, Tensor]) -> Tensor:
    """[tokens, inner] after the scan, D included."""
    a_log, skip, bias = (mixer.own[name].detach() for name in (guess.held.a_log, guess.held.skip, guess.held.dt_bias))
    step = functional.softplus(parts["dt"] + bias).clamp(*guess.limits)
    x = parts["x"].reshape(len(step), len(a_log), -1)
    b, c = (parts[name].reshape(len(step), guess.groups, -1) for name in ("b", "c"))
    state = x.new_zeros(len(a_log), x.shape[-1], b.shape[-1])
    out, _ = chunked(Scan(x, step, -step * a_log.exp(), b, c), state)
    return (out + x * skip[:, None]).flatten(1)


def _block(mixer: Mixer, guess: Guess, norm: Call | None, activation: str | None, scales: str | None) -> StateSpace:
    heads, inner = len(next(iter(mixer.own.values()))), mixer.wanted.shape[-1]
    shared = (mixer.conv.weight.shape[0] - inner) // 2
    order = guess.order
    if scales:
        place = order.index("mixed")
        order = (*order[:place], *guess.mixed, *order[place + 1 :])
    return StateSpace(
        class_name=type(mixer.module).__name__,
        in_proj=mixer.projection(mixer.first),
        conv=mixer.conv_block(guess.activation),
        out_proj=mixer.projection(mixer.last),
        heads=mixer.size(heads, "its number of heads", "heads", "attention"),
        head_dim=mixer.size(inner // heads, "its head dim", "head", "heads"),
        groups=mixer.size(guess.groups, "its number of groups", "group"),
        state_size=mixer.size(shared // guess.groups, "its state size", "state"),
        order=order,
        mixed=guess.mixed,
        a_log=guess.held.a_log,
        skip=guess.held.skip,
        dt_bias=guess.held.dt_bias,
        limits=guess.limits_code,
        norm=None if norm is None else _norm(mixer, norm, guess.groups),
        norm_name="norm" if norm is None else leaf(norm.name),
        gate_activation='"silu"' if activation is None else activation_code(mixer.view, mixer.name, activation),
        factor=factor_code(mixer),
        scales=scales,
    )


def _norm(mixer: Mixer, call: Call, groups: int) -> GatedNorm:
    module: nn.Module = call.module
    counts: Sequence[int] = (1,) if groups == 1 else (1, groups)
    return gated_norm(mixer, module, mixer.wanted.shape[-1], counts, "groups")
