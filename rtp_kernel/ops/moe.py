"""Mixture of experts: which experts serve a token, and what they compute."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.ops.activation import OAI_ALPHA, gated_activation
from rtp_kernel.ops.topk import top_k

SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "sparsemixer")
GROUP_SCORES = ("max", "top2")
CHOICES = ("scores", "logits")


def route(
    logits: Tensor,
    bias: Tensor | None,
    *,
    k: int,
    score: str = "softmax",
    renormalize: bool = False,
    renormalize_eps: float = 0.0,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "top2",
    choose_by: str = "scores",
    soft_cap: float | None = None,
    jitter: float = 0.0,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Experts of each token: logits [T, E] -> weights [T, k] in the logits' dtype, ids [T, k] int64, best first.

    Scores are taken in float32. `bias` [E] is added for the selection only, never to the weights. With `groups` > 1
    only experts of the `top_groups` best groups can be chosen; a group's score is its best expert ("max", DeepSeek-V2)
    or the sum of its two best ("top2", DeepSeek-V3). Ties go to the lower id. `renormalize` divides the weights by
    their sum + `renormalize_eps`. `choose_by` "logits" adds the bias to the logits and chooses by these (Kolibri).
    `soft_cap` c replaces the logits by c tanh(logits / c) first (Laguna). `ids` [T, k] is a choice made elsewhere,
    which is weighted and returned as it is. "sparsemixer" chooses one expert after the other, and weights each by a
    softmax over those left whose logits are within 2 `jitter` of its own, relative to their size (Phi-3.5-MoE).
    """
    if score == "sparsemixer" and ids is None:
        return _sparse_mixer(logits, k, jitter)
    wide = logits.float() if soft_cap is None else torch.tanh(logits.float() / soft_cap) * soft_cap
    scores = _scores(wide, score)
    if ids is None:
        choice = scores if choose_by == "scores" else wide
        choice = choice if bias is None else choice + bias.float()
        if groups > 1:
            choice = _within_best_groups(choice, groups, top_groups, group_score)
        ids = top_k(choice, k)[1]
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + renormalize_eps)
    return (weights * scale).to(logits.dtype), ids


def _sparse_mixer(logits: Tensor, k: int, jitter: float) -> tuple[Tensor, Tensor]:
    left, weights, chosen = logits, [], []
    for _ in range(k):
        best, expert = top_k(left, 1)  # [T, 1]
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
        gates = torch.softmax(left.masked_fill(far, float("-inf")), dim=-1)
        weights.append(gates.gather(-1, expert))
        chosen.append(expert)
        left = left.scatter(-1, expert, float("-inf"))
    return torch.cat(weights, dim=-1), torch.cat(chosen, dim=-1)


def _scores(logits: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return torch.softmax(logits, dim=-1)
    if score == "sigmoid":
        return torch.sigmoid(logits)
    return torch.sqrt(functional.softplus(logits))


def _within_best_groups(choice: Tensor, groups: int, top_groups: int, group_score: str) -> Tensor:
    grouped = choice.view(-1, groups, choice.shape[-1] // groups)  # [T, groups, E / groups]
    members = grouped.amax(-1) if group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(members, dtype=torch.bool).scatter_(-1, top_k(members, top_groups)[1], True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).view_as(choice)


def experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float = OAI_ALPHA,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Weighted sum of gated experts -> [T, H].

    x [T, H], weights and ids [T, k], gate_up [E, 2 I, H] (gate first), down [E, H, I], biases [E, 2 I] and [E, H]. One
    expert after the other, in rising id, as the reference implementations' eager path.
    """
    out = torch.zeros_like(x)
    for expert in torch.unique(ids).tolist():
        rows, places = torch.where(ids == expert)
        gate, up = functional.linear(x[rows], gate_up[expert], of_expert(gate_up_bias, expert)).chunk(2, dim=-1)
        inner = gated_activation(gate, up, activation, limit, alpha)
        result = functional.linear(inner, down[expert], of_expert(down_bias, expert)) * weights[rows, places, None]
        out.index_add_(0, rows, result.to(out.dtype))
    return out


def of_expert(bias: Tensor | None, expert: int) -> Tensor | None:
    """The expert's row of a bias [E, dim]."""
    return None if bias is None else bias[expert]
