"""Routers, by hypothesis: the rule that makes the recorded ids and weights out of the gate's product."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rtp_kernel.ops.moe import GROUP_SCORES, SCORES, route
from rtp_runtime.enable.blocks import Router
from rtp_runtime.enable.code import literal
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import close
from rtp_runtime.enable.recognise.view import View

PREFERRED = {"groups": "n_group|num.*group", "top_groups": "top"}
"""Parts of the names of keys."""


@dataclass(frozen=True, eq=False)
class Routing:
    """What reached the experts: x [T, H], ids and weights [T, k]."""

    x: Tensor
    ids: Tensor
    weights: Tensor

    def by_id(self, weights: Tensor, ids: Tensor, num: int) -> Tensor:
        """[T, E]: references leave the order of a token's experts open."""
        return torch.zeros(len(ids), num).scatter_(1, ids, weights.float())


@dataclass(frozen=True, eq=False)
class _Gate:
    """A product that the choice may have come from."""

    weight: str
    value: Tensor
    bias: str | None
    correction: str | None
    correction_value: Tensor | None
    logits: Tensor


def recognise_router(view: View, name: str, experts: str, routing: Routing) -> Router:
    """The rule of the block `name`, whose routed experts are its child `experts`.

    Raises:
        UnrecognisedError: none of our rules makes these ids and weights.
    """
    for gate in _gates(view.module(name), experts, routing):
        num = gate.value.shape[0]
        wanted = routing.by_id(routing.weights, routing.ids, num)
        for options in _choices(view, name, gate, routing):
            for renormalize in (False, True):
                weights, ids = route(gate.logits, gate.correction_value, renormalize=renormalize, **options)
                if not torch.equal(ids.sort().values, routing.ids.sort().values):
                    break
                found = routing.by_id(weights, ids, num)
                scale = float((wanted.sum() / found.sum()).item())
                if torch.allclose(found * scale, wanted, rtol=2e-5, atol=2e-5 * float(wanted.abs().max())):
                    return _router(view, name, gate, options | {"renormalize": renormalize}, scale)
    raise UnrecognisedError(
        view.label(name), "no rule of ours chooses and weights its experts.", "a routing rule in rtp_kernel.ops.moe"
    )


def _gates(module: nn.Module, experts: str, routing: Routing) -> Iterator[_Gate]:
    """Every matrix [E, H] outside the experts, with each way to use the vectors [E] beside it."""
    tensors = {
        name: value.detach()
        for name, value in (*module.named_parameters(), *module.named_buffers())
        if not name.startswith(f"{experts}.")
    }
    hidden = routing.x.shape[-1]
    for name, value in tensors.items():
        if value.ndim != 2 or value.shape[1] != hidden or value.shape[0] <= int(routing.ids.max()):
            continue
        vectors: list[str | None] = [key for key, each in tensors.items() if each.numel() == value.shape[0]]
        for bias, correction in itertools.product([None, *vectors], repeat=2):
            if len({bias, correction} - {None}) == len(vectors):
                added = None if bias is None else tensors[bias].flatten()
                chosen = None if correction is None else tensors[correction].flatten()
                logits = functional.linear(routing.x, value.float(), added)
                yield _Gate(name, value, bias, correction, chosen, logits)


def _choices(view: View, name: str, gate: _Gate, routing: Routing) -> Iterator[dict[str, Any]]:
    """Options of `route` that decide which experts are chosen, the usual ones first."""
    caps = [None, *(value for key, value in _numbers(view, name) if "cap" in key and value > 0)]
    groups = [(1, 1, "top2"), *_groups(view, name, gate.value.shape[0])]
    choices = ("scores", "logits") if gate.correction else ("scores",)
    jitters = [value for key, value in _numbers(view, name) if "jitter" in key and value > 0]
    for score, choose_by, cap, (num, top, kind) in itertools.product(SCORES, choices, caps, groups):
        if score == "sparsemixer":
            yield from ({"k": routing.ids.shape[1], "score": score, "jitter": jitter} for jitter in jitters)
            continue
        yield {
            "k": routing.ids.shape[1],
            "score": score,
            "choose_by": choose_by,
            "soft_cap": cap,
            "groups": num,
            "top_groups": top,
            "group_score": kind,
        }


def _numbers(view: View, name: str) -> list[tuple[str, float]]:
    values = [(key, getattr(view.config, key, None)) for key in view.keys_inside(name)]
    return [(key, value) for key, value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def _groups(view: View, name: str, num: int) -> list[tuple[int, int, str]]:
    sizes = [int(value) for key, value in _numbers(view, name) if "group" in key and value == int(value)]
    pairs = [(a, b) for a in sizes for b in sizes if 1 < a <= num // 2 and num % a == 0 and 1 <= b < a]
    return [(a, b, kind) for a, b in dict.fromkeys(pairs) for kind in GROUP_SCORES]


def _router(view: View, name: str, gate: _Gate, options: dict[str, Any], scale: float) -> Router:
    label, keys = view.label(name), view.keys_inside(name)
    module = view.module(name)
    shapes = {key: tuple(value.shape) for key, value in (*module.named_parameters(), *module.named_buffers())}
    correction = shapes.get(gate.correction or "", ())
    child = gate.weight.split(".")[0]
    pinned, wide = _dtypes(view, f"{name}.{child}", gate)
    return Router(
        name=child,
        weight=gate.weight,
        num_experts=view.express(gate.value.shape[0], keys, label, "its number of experts", "experts$").code,
        top_k=view.express(options["k"], keys, label, "its number of experts per token", "per_tok|top").code,
        options=tuple(_options(view, name, options, scale)) + ((("wide", "True"),) if wide else ()),
        bias=gate.bias,
        correction=gate.correction,
        correction_shape=("1",) * (len(correction) - 1) + ("experts.count",),
        pinned=pinned,
    )


def _options(view: View, name: str, options: dict[str, Any], scale: float) -> Iterator[tuple[str, str]]:
    """What the router is given beside sizes, as code."""
    label, keys = view.label(name), view.keys_inside(name)
    yield "score", literal(options["score"])
    yield "renormalize", str(options["renormalize"])
    if options["renormalize"] and (eps := _epsilon(view, name)):
        yield "renormalize_eps", eps
    if not close(scale, 1.0):
        yield "scale", view.express(scale, keys, label, "the factor of its weights", "scal|factor").code
    if "jitter" in options:
        yield "jitter", view.express(options["jitter"], keys, label, "its jitter", "router").code
    if options.get("groups", 1) > 1:
        names = [key for key in keys if "group" in key]
        for option in ("groups", "top_groups"):
            yield option, view.express(options[option], names, label, f"its number of {option}", PREFERRED[option]).code
        yield "group_score", literal(options["group_score"])
    if options.get("choose_by", "scores") != "scores":
        yield "choose_by", literal(options["choose_by"])
    if options.get("soft_cap") is not None:
        yield "soft_cap", view.express(options["soft_cap"], keys, label, "its soft cap").code


def _epsilon(view: View, name: str) -> str | None:
    """What the modeling code adds to the sum that it divides by: too small to show in any output."""
    for module in view.module(name).modules():
        if module is view.module(name) or "out" in type(module).__name__ or "Gat" in type(module).__name__:
            found = re.search(r"sum\([^\n]*\) \+ (1e-\d+)", inspect.getsource(type(module)))
            if found:
                return found[1].replace("e-0", "e-")
    return None


@torch.no_grad()
def _dtypes(view: View, name: str, gate: _Gate) -> tuple[bool, bool]:
    """In a bfloat16 model: whether the product is in float32, and whether only the weights come out so."""
    calls = view.recording.calls_of(name)
    module = copy.deepcopy(view.module(name)).bfloat16()
    given = [x.bfloat16() if x.is_floating_point() else x for x in calls[0].inputs]
    try:
        outputs = [x for x in module(*given) if isinstance(x, Tensor)]
    except Exception:  # code of a reference in a dtype that it may not have seen
        return False, False
    floats = [x for x in outputs if x.is_floating_point()]
    products = [x for x in floats if x.shape[-1] == gate.value.shape[0]]
    weights = [x for x in floats if x.shape[-1] != gate.value.shape[0]]
    x = given[0].reshape(-1, given[0].shape[-1])
    exact = functional.linear(x.float(), gate.value.bfloat16().float())
    pinned = bool(products) and products[0].dtype == torch.float32 and bool((products[0] - exact).abs().max() < 1e-4)
    return pinned, not pinned and bool(weights) and weights[0].dtype == torch.float32
