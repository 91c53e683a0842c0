"""Grouped attention, from the query, key and value that reach the attention function back to the projections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rtp_runtime.enable.blocks import Attention, Projection
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import close, express, same
from rtp_runtime.enable.recognise.norm import recognise_norm
from rtp_runtime.enable.recognise.rotary import candidates
from rtp_runtime.enable.recognise.tables import Table
from rtp_runtime.enable.recognise.view import View, layer_index, leaf, linears, rows
from rtp_runtime.enable.recording import AttentionCall, Call
from rtp_runtime.enable.sizes import Sizes

WINDOW_KEY = "sliding_window"
"""Read by transformers' mask functions rather than by the modeling file."""


@dataclass(frozen=True)
class _Path:
    """How a projection's output became a query or key."""

    projection: Projection
    norm: Call | None = None
    norm_after_rotary: bool = False
    table: Table | None = None
    layout: str | None = None

    @property
    def turns(self) -> tuple[str | None, str | None, bool]:
        return self.table.key if self.table else None, self.layout, self.norm_after_rotary


def is_attention(view: View, name: str) -> bool:
    """Whether it called the attention function that transformers lets one replace."""
    return name in view.recording.attention


def recognise_attention(view: View, name: str) -> Attention:
    """The attention block `name`.

    Raises:
        UnrecognisedError: a part of it is not one of ours, named.
    """
    call = view.recording.attention[name]
    children = view.recording.children(name)
    q_path, k_path = (_trace(view, name, children, part, x) for part, x in (("query", call.query), ("key", call.key)))
    v_path = _trace(view, name, children, "value", call.value)
    if v_path.norm is not None or v_path.table is not None:
        raise UnrecognisedError(
            view.label(name), "its values are normed or turned.", "attention whose values are changed"
        )
    if q_path.turns != k_path.turns:
        raise UnrecognisedError(view.label(name), "queries and keys are treated differently.", "a rotary of its own")
    window = _window(view, name, call)
    scale, cap = _scale(view, name, call), call.options.get("softcap")
    sinks = call.options.get("s_aux")
    _check_formula(view, name, call, window)
    partial = k_path.table is not None and 2 * k_path.table.inv_freq.numel() < call.key.shape[-1]
    return Attention(
        class_name=type(view.module(name)).__name__,
        q=q_path.projection,
        k=k_path.projection,
        v=v_path.projection,
        out=_output(view, name, children, call),
        sizes=Sizes.of(view.config),
        scale=scale,
        soft_cap=view.express(cap, view.keys_of(view.module(name)), view.label(name), "its soft cap").code
        if cap
        else None,
        sinks=sinks is not None,
        rotary=f'Rotary("{k_path.layout}")' if k_path.table else None,
        table=k_path.table.key if k_path.table else None,
        partial=partial,
        window=_window_code(view, window),
        **_norms(view, name, q_path, k_path),
    )


def _window_code(view: View, window: int | None) -> str | None:
    if window is None:
        return None
    found = express(window, view.config, [*view.reference.reads, WINDOW_KEY])
    if found is None:
        block = type(view.reference.model).__name__
        raise UnrecognisedError(block, f"its window of {window} follows from none of the config keys.", "that rule")
    return found.code


def _norms(view: View, name: str, q: _Path, k: _Path) -> dict[str, Any]:
    if q.norm is None and k.norm is None:
        return {}
    if q.norm is None or k.norm is None:
        raise UnrecognisedError(view.label(name), "only one of queries and keys is normed.", "attention with one norm")
    norm = recognise_norm(view, q.norm.name)
    if recognise_norm(view, k.norm.name) != norm:
        raise UnrecognisedError(
            view.label(name), "queries and keys have different norms.", "attention with two kinds of norm"
        )
    return {
        "q_norm": leaf(q.norm.name),
        "k_norm": leaf(k.norm.name),
        "norm": norm,
        "norm_flat": q.norm.inputs[0].ndim == 3,
        "norm_after_rotary": q.norm_after_rotary,
    }


def _trace(view: View, name: str, children: list[Call], what: str, target: Tensor) -> _Path:
    """Follow one of query, key, value [1, heads, tokens, dim] back to a projection."""
    heads = target.shape[1]
    tracer = _Tracer(
        view,
        heads,
        layer_index(name),
        rows(target, heads),
        [call for call in children if call not in linears(children) and list(call.module.parameters())],
    )
    for projection, base in _slices(children, tracer.wanted.shape[-1], target.shape[-1]):
        path = tracer.match(projection, base)
        if path is not None:
            return path
    raise UnrecognisedError(
        view.label(name),
        f"its {what} is no projection that is normed per head or whole and turned by a known rotary layout.",
        f"an op for how it makes its {what}",
    )


@dataclass(frozen=True, eq=False)
class _Tracer:
    """Tries what may stand between a projection and `wanted` [tokens, heads * dim]: norm and rotary in either order."""

    view: View
    heads: int
    layer: int
    wanted: Tensor
    norms: list[Call]

    def match(self, projection: Projection, base: Tensor) -> _Path | None:
        """How `base` became what is wanted; None when it did not."""
        if same(base, self.wanted):
            return _Path(projection)
        for norm, normed in self._normed(base):
            if same(normed, self.wanted):
                return _Path(projection, norm)
            for table, layout, result in candidates(self.view, normed, self.heads, self.layer):
                if same(result, self.wanted):
                    return _Path(projection, norm, False, table, layout)
        for table, layout, result in candidates(self.view, base, self.heads, self.layer):
            if same(result, self.wanted):
                return _Path(projection, table=table, layout=layout)
            for norm, normed in self._normed(result):
                if same(normed, self.wanted):
                    return _Path(projection, norm, True, table, layout)
        return None

    def _normed(self, x: Tensor) -> Iterator[tuple[Call, Tensor]]:
        """The norms that were given x, and what they gave."""
        for call in self.norms:
            if call.inputs and call.inputs[0].numel() == x.numel() and same(rows(call.inputs[0], self.heads), x):
                yield call, rows(call.outputs[0], self.heads)


def _slices(children: list[Call], size: int, dim: int) -> list[tuple[Projection, Tensor]]:
    """Outputs of the projections that are `size` wide, and runs of whole heads in wider ones."""
    found = []
    for call in linears(children):
        out = rows(call.outputs[0])
        bias = call.module.bias is not None
        if out.shape[-1] == size:
            found.append((Projection(leaf(call.name), bias, 0, size), out))
        elif out.shape[-1] > size:
            for start in range(0, out.shape[-1] - size + 1, dim):
                part = Projection(leaf(call.name), bias, start, size, whole=False)
                found.append((part, out[:, start : start + size]))
    return found


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


def _scale(view: View, name: str, call: AttentionCall) -> str | None:
    dim = call.query.shape[-1]
    scale = call.options.get("scaling", dim**-0.5)
    if close(scale, dim**-0.5):
        return None
    return view.express(scale, view.keys_of(view.module(name)), view.label(name), "its softmax scale").code


def _check_formula(view: View, name: str, call: AttentionCall, window: int | None) -> None:
    """The attention function itself: softmax of scaled, capped, masked products, with sinks in the denominator."""
    groups = call.query.shape[1] // call.key.shape[1]
    key, value = (x.double().repeat_interleave(groups, dim=1) for x in (call.key, call.value))
    scores = call.query.double() @ key.transpose(2, 3) * call.options.get("scaling", call.query.shape[-1] ** -0.5)
    if cap := call.options.get("softcap"):
        scores = torch.tanh(scores / cap) * cap
    tokens = scores.shape[-1]
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
            "its attention function is not softmax attention with scale, window, soft cap or sinks.",
            "an attention op of its own",
        )


def _output(view: View, name: str, children: list[Call], call: AttentionCall) -> Projection:
    wanted = rows(call.output)
    result = rows(view.recording.of(name).outputs[0])
    for child in linears(children):
        if (
            child.inputs[0].numel() == wanted.numel()
            and same(rows(child.inputs[0]), wanted)
            and same(rows(child.outputs[0]), result)
        ):
            return Projection(leaf(child.name), child.module.bias is not None, 0, result.shape[-1])
    raise UnrecognisedError(
        view.label(name),
        "what attention returns does not go straight through one output projection.",
        "the steps between",
    )
