"""How a router makes weights of its logits: one description, and the ones that differ from it in one thing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rtp_kernel.ops.moe import route


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What happens between router logits and the weights of chosen experts."""

    k: int
    score: str = "softmax"
    """As in `rtp_kernel.ops.moe.SCORES`, or "softmax of chosen": the softmax comes after the choice."""
    renormalize: bool = False
    renormalize_eps: float = 0.0
    scale: float = 1.0
    bias: str = "choice"
    """Where a correction bias goes, if there is one: "choice", "weights" too, or "none"."""
    groups: int = 1
    top_groups: int = 1
    group_score: str = "top2"


def routed(logits: Tensor, bias: Tensor | None, routing: Routing) -> Tensor:
    """Dense weights [tokens, experts] of logits [tokens, experts]; zero where an expert is not chosen."""
    wide = logits.float()
    scores = wide
    if routing.score == "softmax of chosen":
        chosen = wide.topk(routing.k, dim=-1)
        weights, ids = chosen.values.softmax(-1) * routing.scale, chosen.indices
    else:
        used = None if routing.bias == "none" else bias
        choose = {"k": routing.k, "score": routing.score, "groups": routing.groups}
        more = {"top_groups": routing.top_groups, "group_score": routing.group_score}
        weights, ids = route(wide, used, **choose, **more)  # type: ignore[arg-type]
        if routing.bias == "weights" and bias is not None:
            weights = weights + bias.float()[ids]
        if routing.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + routing.renormalize_eps)
        weights = weights * routing.scale
    return torch.zeros_like(scores).scatter_(1, ids, weights)


def routing_variants(routing: Routing, num_experts: int, has_bias: bool) -> Iterator[tuple[str, Routing]]:
    """(stable name, routing) of the routings that differ in one thing, the commonest mistakes first."""
    yield "router-renormalise", replace(routing, renormalize=not routing.renormalize)
    for score in ("softmax", "sigmoid", "sqrtsoftplus", "softmax of chosen"):
        if score != routing.score:
            yield "router-score", replace(routing, score=score)
    if routing.scale != 1.0:
        yield "router-scale-left-out", replace(routing, scale=1.0)
        yield "router-scale-twice", replace(routing, scale=routing.scale**2)
    if has_bias:
        for place in ("choice", "weights", "none"):
            if place != routing.bias:
                yield f"router-bias-{place}", replace(routing, bias=place)
    if routing.groups > 1:
        yield "router-group-score", replace(routing, group_score="max" if routing.group_score == "top2" else "top2")
        yield "router-groups-ignored", replace(routing, groups=1, top_groups=1)
    for k in (routing.k - 1, routing.k + 1):
        if 0 < k <= num_experts:
            yield "router-top-k", replace(routing, k=k)
