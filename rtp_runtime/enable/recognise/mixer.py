"""What mixers with a causal convolution have in common: their projections, the convolution, sizes, and a gated norm."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rtp_kernel.ops.activation import ACTIVATIONS
from rtp_kernel.ops.norm import gated_rms_norm
from rtp_runtime.enable.blocks import Projection
from rtp_runtime.enable.blocks.convolution import Conv
from rtp_runtime.enable.blocks.state_space import GatedNorm
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import combination, same
from rtp_runtime.enable.recognise.mlp import activation_code
from rtp_runtime.enable.recognise.norm import eps_code, eps_values
from rtp_runtime.enable.recognise.view import View, linears, projection_of, rows
from rtp_runtime.enable.recording import Call


@dataclass(frozen=True, eq=False)
class Mixer:
    """A module with a depthwise convolution, one projection of its input and one that gives its output."""

    view: View
    name: str
    call: Call
    first: Call
    last: Call
    conv_name: str
    conv: nn.Conv1d
    factor: float
    """What its input is multiplied by before the first projection."""

    @property
    def module(self) -> nn.Module:
        return self.view.module(self.name)

    @property
    def projected(self) -> Tensor:
        """[tokens, width]"""
        return rows(self.first.outputs[0])

    @property
    def wanted(self) -> Tensor:
        """What the last projection was given, [tokens, inner]."""
        return rows(self.last.inputs[0])

    @property
    def own(self) -> dict[str, nn.Parameter]:
        """Parameters that it holds itself."""
        return dict(self.module.named_parameters(recurse=False))

    def projection(self, call: Call) -> Projection:
        return projection_of(call, self.name)

    def others(self) -> list[Call]:
        """Calls of modules inside that are neither of the two projections."""
        children = self.view.recording.children(self.name)
        return [child for child in children if child is not self.first and child is not self.last]

    def refuse(self, reason: str, needs: str) -> UnrecognisedError:
        return UnrecognisedError(self.view.label(self.name), reason, needs)

    def size(self, value: int, what: str, hint: str, avoid: str = " ") -> str:
        """Code of a size, from the keys that the class reads; names only choose among keys of one value."""
        return size_code(self.view, self.name, value, what, hint, avoid)

    def convolved(self, x: Tensor, activation: str | None) -> Tensor:
        """x [tokens, channels] through its convolution."""
        weight, bias = self.conv.weight.detach(), self.conv.bias
        padded = functional.pad(x.t(), (weight.shape[-1] - 1, 0))
        out = functional.conv1d(padded[None], weight, None if bias is None else bias.detach(), groups=len(weight))[
            0
        ].t()
        return out if activation is None else ACTIVATIONS[activation](out)

    def activations(self) -> Iterator[str | None]:
        """The likely ones first: those that the config names, then silu, none, and all others."""
        values = [getattr(self.view.config, key, None) for key in self.view.keys_of(self.module)]
        named = [value for value in values if isinstance(value, str) and value in ACTIVATIONS]
        yield from dict.fromkeys([*named, "silu", None, "gelu"])

    def conv_block(self, activation: str | None) -> Conv:
        kernel = self.size(self.conv.weight.shape[-1], "its number of taps", "conv")
        code = None if activation is None else activation_code(self.view, self.name, activation)
        return Conv(self.conv_name, kernel, self.conv.bias is not None, code)


def size_code(view: View, name: str, value: int, what: str, hint: str, avoid: str = " ") -> str:
    """`Mixer.size` of any module.

    Raises:
        UnrecognisedError: it follows from no key.
    """
    keys = sorted(view.keys_of(view.module(name), "hidden_size"), key=lambda key: (hint not in key, avoid in key, key))
    numbers = {key: found for key in keys if (found := _number(view.config, key)) is not None}
    for key, number in numbers.items():
        if number == value:
            return f"config.{key}"
    for key, number in numbers.items():
        for other, second in numbers.items():
            if key < other and int(number * second) == value:
                whole = isinstance(number, int) and isinstance(second, int)
                return f"config.{key} * config.{other}" if whole else f"int(config.{key} * config.{other})"
    reason = f"{what} is {value}, which follows from none of the config keys that it reads."
    raise UnrecognisedError(view.label(name), reason, "that rule")


def _number(config: Any, key: str) -> int | float | None:
    value = getattr(config, key, None)
    return value if isinstance(value, int | float) and not isinstance(value, bool) and value else None


def convolution_of(module: nn.Module) -> tuple[str, nn.Conv1d] | None:
    """The one depthwise convolution that the module holds itself."""
    found = [(name, child) for name, child in module.named_children() if isinstance(child, nn.Conv1d)]
    if len(found) != 1 or found[0][1].weight.shape[1] != 1:
        return None
    return found[0]


def has_convolution(view: View, name: str) -> bool:
    """Whether it may be a mixer: it ran once, and holds one depthwise convolution."""
    return convolution_of(view.module(name)) is not None and len(view.recording.calls_of(name)) == 1


def find_mixer(view: View, name: str) -> Mixer:
    """The parts that every mixer has.

    Raises:
        UnrecognisedError: no projection of its input, or none that gives its output.
    """
    call = view.recording.of(name)
    held = convolution_of(view.module(name))
    assert held is not None
    calls = linears(view.recording.children(name))
    first = [(c, f) for c in calls if (f := _factor(c.inputs[0], call.inputs[0])) is not None]
    last = [c for c in calls if same(rows(c.outputs[0]), rows(call.outputs[0]))]
    if len(first) != 1 or len(last) != 1 or first[0][0] is last[0]:
        raise UnrecognisedError(
            view.label(name), f"{len(first)} projections of its input, {len(last)} of its output.", "one of each"
        )
    return Mixer(view, name, call, first[0][0], last[0], *held, first[0][1])


def _factor(given: Tensor, x: Tensor) -> float | None:
    found = combination(given, {"x": x}) if given.shape == x.shape else None
    return None if found is None else found["x"]


@torch.no_grad()
def gated_norm(mixer: Mixer, norm: nn.Module, dim: int, groups: Sequence[int], code: str | None) -> GatedNorm:
    """The norm with a gate that `norm` is, of rows of `dim` channels; `code` of the larger ones of `groups`.

    Raises:
        UnrecognisedError: it is none of ours.
    """
    generator = torch.Generator().manual_seed(1)
    gate = torch.randn(1, 64, dim, generator=generator)
    x = torch.randn(1, 64, dim, generator=generator) * 1e-2  # small, so that a wrong eps shows
    weight = norm.weight
    assert isinstance(weight, Tensor)
    wanted, weight = norm(x, gate), weight.detach()
    for count in groups:
        for first in (True, False):
            for eps in eps_values(mixer.view, norm):
                for act in ("silu", "sigmoid"):
                    found = gated_rms_norm(x, gate, weight, eps, activation=act, groups=count, gate_first=first)
                    if same(found, wanted):
                        wide = _is_wide(norm, x, gate, eps, act, count, first)
                        return GatedNorm(eps_code(mixer.view, eps), code if count > 1 else None, first, wide, act)
    raise mixer.refuse(f"its norm ({type(norm).__name__}) is none of ours with a gate.", "a norm component of its own")


def _is_wide(norm: nn.Module, x: Tensor, gate: Tensor, eps: float, act: str, count: int, first: bool) -> bool:
    """Whether the weight is multiplied in float32, which only a narrower dtype shows."""
    narrow: Any = copy.deepcopy(norm).bfloat16()
    x, gate = x.bfloat16(), gate.bfloat16()
    wanted = narrow(x, gate)

    def error(wide: bool) -> float:
        options: dict[str, Any] = {"activation": act, "wide": wide, "groups": count, "gate_first": first}
        return float((gated_rms_norm(x, gate, narrow.weight.detach(), eps, **options) - wanted).abs().sum())

    return error(True) < error(False)


def factor_code(mixer: Mixer) -> str | None:
    """Code of what the input is multiplied by; None for 1."""
    if mixer.factor == 1.0:
        return None
    view = mixer.view
    return view.express(mixer.factor, view.keys_of(mixer.module), view.label(mixer.name), "its input's factor").code
