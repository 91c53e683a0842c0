"""The attention function itself: scale, window, soft cap, sinks and ALiBi, proven on its result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rtp_kernel.ops.attention import alibi_slopes
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import close, same
from rtp_runtime.enable.recognise.view import View
from rtp_runtime.enable.recording import AttentionCall


@dataclass(frozen=True)
class Core:
    """Code of what `Attention` is given, but for the window, which is a number of tokens."""

    scale: str | None
    window: int | None
    soft_cap: str | None
    sinks: bool
    alibi: tuple[str, ...]


def recognise_core(view: View, name: str, call: AttentionCall) -> Core:
    """What the module `name` hands to attention, and that attention is ours.

    Raises:
        UnrecognisedError: a mask, a scale or a formula that `Attention` has not.
    """
    window = _window(view, name, call)
    cap = call.options.get("softcap")
    _check_formula(view, name, call, window)
    keys, label = view.keys_of(view.module(name)), view.label(name)
    return Core(
        scale=scale_code(view, name, call, call.options.get("scaling", call.query.shape[-1] ** -0.5)),
        window=window,
        soft_cap=view.express(cap, keys, label, "its soft cap").code if cap else None,
        sinks=call.options.get("s_aux") is not None,
        alibi=_alibi(view, name, call),
    )


def _window(view: View, name: str, call: AttentionCall) -> int | None:
    tokens = call.query.shape[2]
    if call.mask is None:
        raise UnrecognisedError(
            view.label(name), "it attends without a mask, so it is not causal.", "attention that looks ahead"
        )
    visible = (call.mask if call.mask.dtype == torch.bool else call.mask == 0)[0, 0]
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    window = int(visible[-1].sum())
    if not torch.equal(visible, (distance >= 0) & (distance < window)):
        raise UnrecognisedError(
            view.label(name), "its mask is neither causal nor a causal window.", "attention with this mask"
        )
    return None if window == tokens else window


def scale_code(view: View, name: str, call: AttentionCall, scale: float) -> str | None:
    """Code of a softmax scale; None where it is the usual head_dim**-0.5."""
    dim = call.query.shape[-1]
    if close(scale, dim**-0.5):
        return None
    if close(scale, 1.0):
        return "1.0"
    return view.express(scale, view.keys_of(view.module(name)), view.label(name), "its softmax scale").code


def _alibi(view: View, name: str, call: AttentionCall) -> tuple[str, ...]:
    slopes: Tensor | None = call.options.get("slopes")
    if slopes is None:
        return ()
    scale = call.options["scaling"]
    for code, maximum in [*_maxima(view), ("8.0", 8.0)]:
        wanted = alibi_slopes(len(slopes), maximum)
        if torch.allclose(slopes, wanted, rtol=1e-4, atol=2e-5):
            return (f"alibi={code}",)
        rounded = wanted.bfloat16().float() * scale
        if torch.allclose(slopes, rounded, rtol=1e-4, atol=2e-5):
            return (f"alibi={code}", "alibi_scale=self.head_dim**-0.5", "alibi_dtype=torch.bfloat16")
    raise UnrecognisedError(view.label(name), "the slopes of its heads are not ALiBi's.", "these slopes")


def _maxima(view: View) -> list[tuple[str, float]]:
    """Numbers of the config that may be the largest exponent of a slope."""
    values = view.config.to_dict()
    nested = {key: value for key, value in values.items() if isinstance(value, dict)}
    found = [(f"config.{key}", value) for key, value in values.items()]
    found += [(f"config.{key}.{inner}", value) for key, part in nested.items() for inner, value in part.items()]
    return [
        (code, float(value)) for code, value in found if "alibi" in code and type(value) in (int, float) and value > 1
    ]


def _check_formula(view: View, name: str, call: AttentionCall, window: int | None) -> None:
    """Softmax of scaled, capped, masked products, with slopes added and sinks in the denominator."""
    groups = call.query.shape[1] // call.key.shape[1]
    key, value = (x.double().repeat_interleave(groups, dim=1) for x in (call.key, call.value))
    scores = call.query.double() @ key.transpose(2, 3) * call.options.get("scaling", call.query.shape[-1] ** -0.5)
    if cap := call.options.get("softcap"):
        scores = torch.tanh(scores / cap) * cap
    tokens = scores.shape[-1]
    if (slopes := call.options.get("slopes")) is not None:
        scores = scores + slopes.double()[:, None, None] * torch.arange(tokens)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    scores = scores.masked_fill((distance < 0) | (distance >= (window or tokens)), float("-inf"))
    if (sinks := call.options.get("s_aux")) is not None:
        column = sinks.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    if not same((weights @ value).transpose(1, 2).float(), call.output):
        raise UnrecognisedError(
            view.label(name),
            "its attention function is not softmax attention with scale, window, soft cap, slopes or sinks.",
            "an attention op of its own",
        )
