"""Projections and activations that are modules of a decoder layer themselves."""

from __future__ import annotations

from torch import nn

from rtp_kernel.ops.activation import ACTIVATIONS
from rtp_runtime.enable.blocks.lone import HIDDEN, LoneActivation, LoneLinear
from rtp_runtime.enable.blocks.projection import Projection
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import express, same
from rtp_runtime.enable.recognise.mlp import activation_code
from rtp_runtime.enable.recognise.view import View, bias_of, is_linear, transposed


def is_lone_linear(view: View, name: str) -> bool:
    """Whether the module is a projection."""
    return is_linear(view.module(name))


def recognise_lone_linear(view: View, name: str) -> LoneLinear:
    """The projection `name`.

    Raises:
        UnrecognisedError: a width that follows from no key.
    """
    call = view.recording.of(name)
    inner, outer = (_width(view, name, tensor.shape[-1]) for tensor in (call.inputs[0], call.outputs[0]))
    return LoneLinear(Projection("", bias_of(call.module), transposed=transposed(call.module)), inner, outer)


def _width(view: View, name: str, width: int) -> str:
    if width == view.config.hidden_size:
        return HIDDEN
    keys = view.keys_of(view.module(name.rpartition(".")[0]))
    found = express(width, view.config, keys)
    return found.code if found else view.express(width, [*keys, "hidden_size"], view.label(name), "its width").code


def is_lone_activation(view: View, name: str) -> bool:
    """Whether the module holds nothing and keeps the shape of what it is given."""
    module, calls = view.module(name), view.recording.calls_of(name)
    empty = not any(True for _ in module.parameters()) and not any(True for _ in module.buffers())
    return empty and len(calls) == 1 and _activation(view, name) is not None


def recognise_lone_activation(view: View, name: str) -> LoneActivation:
    """The activation `name`.

    Raises:
        UnrecognisedError: it is none of ours.
    """
    found = _activation(view, name)
    if found is None:
        raise UnrecognisedError(view.label(name), "it is no activation of ours.", "that activation")
    return LoneActivation(activation_code(view, name.rpartition(".")[0], found))


def _activation(view: View, name: str) -> str | None:
    call = view.recording.of(name)
    if not call.inputs or not call.outputs or isinstance(call.module, nn.Dropout | nn.Identity):
        return None
    x, wanted = call.inputs[0], call.outputs[0]
    if x.shape != wanted.shape or not x.is_floating_point():
        return None
    return next((key for key, function in ACTIVATIONS.items() if same(function(x), wanted)), None)
