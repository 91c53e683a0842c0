"""Which of our norms a module is: both run on random data until they agree."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from rtp_kernel.ops.norm import layer_norm, rms_norm
from rtp_runtime.alternatives import EPS_VALUES
from rtp_runtime.enable.blocks import Norm
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import express, same
from rtp_runtime.enable.recognise.view import View


def is_norm(view: View, name: str) -> bool:
    """Whether it has no modules inside, as norms have."""
    return not list(view.module(name).children())


@torch.no_grad()
def recognise_norm(view: View, name: str) -> Norm:
    """The norm that the module `name` computes.

    Raises:
        UnrecognisedError: it is none of RMSNorm (w or 1 + w) and LayerNorm.
    """
    module = view.module(name)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    given = [parameter for parameter in (weight, bias) if parameter is not None]
    if given and all(parameter.ndim == 2 for parameter in given) and len(list(module.parameters())) == len(given):
        return _per_head(view, name, module, given[0].shape)
    if any(parameter.ndim != 1 for parameter in given) or len(list(module.parameters())) != len(given):
        raise UnrecognisedError(
            view.label(name), "it is not a norm with one weight per channel.", "a norm component of its own"
        )
    # Small values, so that a wrong eps shows.
    width = view.recording.calls_of(name)[0].inputs[0].shape[-1]
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(1)) * 1e-3
    wanted = module(x)
    for eps in eps_values(view, module):
        for kind, offset in (("rms", 0.0), ("rms", 1.0), ("layer", 0.0), ("layer", 1.0)):
            scaled = weight + offset if kind == "layer" and weight is not None else weight
            found = rms_norm(x, weight, eps, offset) if kind == "rms" else layer_norm(x, scaled, bias, eps)
            if same(found, wanted) and (kind == "layer" or bias is None) and not (offset and weight is None):
                wide = kind == "rms" and not offset and weight is not None and _is_wide(module, x * 1e3, eps)
                pinned = kind == "rms" and weight is not None and view.kept_in_float32(name)
                code, own = eps_code(view, eps), weight is not None
                return Norm(kind, code, bool(offset), bias is not None, own, wide=wide or pinned, pinned=pinned)
    raise UnrecognisedError(
        view.label(name), "its output is neither RMSNorm's (w or 1 + w) nor LayerNorm's.", "a norm component of its own"
    )


def _per_head(view: View, name: str, module: Any, shape: torch.Size) -> Norm:
    """A LayerNorm whose parameters are [heads, dim]."""
    x = torch.randn(1, 24, *shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    wanted = module(x)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    for eps in eps_values(view, module):
        found = layer_norm(x, None, None, eps)
        found = found if weight is None else found * weight
        if same(found if bias is None else found + bias, wanted):
            return Norm("layer", eps_code(view, eps), False, bias is not None, weight is not None, per_head=True)
    raise UnrecognisedError(view.label(name), "it is no LayerNorm of each head.", "a norm component of its own")


def _is_wide(module: nn.Module, x: Tensor, eps: float) -> bool:
    """Whether the product with w is in float32 in a bfloat16 model: the two roundings differ in many places."""
    narrow, x = copy.deepcopy(module).bfloat16(), x.bfloat16()
    try:
        wanted = narrow(x)
    except (RuntimeError, TypeError):  # a module that runs in float32 alone
        return False
    weight = narrow.get_parameter("weight")
    early, late = (rms_norm(x, weight.to(dtype), eps) for dtype in (torch.float32, torch.bfloat16))
    return bool((early != wanted).sum() < (late != wanted).sum())


def eps_values(view: View, module: nn.Module) -> list[float]:
    """What the module's eps may be: an attribute of its own, then numbers of the config, then what files write."""
    own = [value for key, value in vars(module).items() if "eps" in key and isinstance(value, float)]
    keys = [key for key in view.reference.reads if "eps" in key]
    return [*own, *(value for key in keys if isinstance(value := getattr(view.config, key), float)), *EPS_VALUES]


def eps_code(view: View, eps: float) -> str:
    """The config key of an eps, or the number."""
    found = express(eps, view.config, [key for key in view.reference.reads if "eps" in key])
    return found.code if found else repr(eps)
