"""Mixture of experts: the router and the experts. What stands around them (shared experts, gates) is the model's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtp_kernel.components.base import Binding, Component, parameter
from rtp_kernel.ops.activation import OAI_ALPHA, check_activation, slope
from rtp_kernel.ops.linear import linear
from rtp_kernel.ops.moe import CHOICES, GROUP_SCORES, SCORES, experts, route
from rtp_kernel.registry import OpFunction


class _Router(Component):
    """The product with the gate's `weight` [experts, hidden] (and `bias` [experts]), and the op `route`."""

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        *,
        score: str,
        k: int,
        dtype: torch.dtype | None,
        gate_bias: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        group_score, choose_by = options.get("group_score", "top2"), options.get("choose_by", "scores")
        if score not in SCORES or group_score not in GROUP_SCORES:
            raise ValueError(f'router score "{score}", group score "{group_score}": known are {SCORES}, {GROUP_SCORES}')
        if choose_by not in CHOICES:
            raise ValueError(f'router chooses by "{choose_by}": known are {CHOICES}')
        if not 1 <= k <= num_experts:
            raise ValueError(f"router: {k} experts per token of {num_experts}")
        self.weight = parameter(num_experts, hidden, dtype=dtype)
        self.bias = parameter(num_experts, dtype=dtype) if gate_bias else None
        self.num_experts = num_experts
        self.hidden = hidden
        self.top_k = k
        self._pinned = dtype
        self._options = {"k": k, "score": score, **options}
        self._linear: OpFunction = linear
        self._route: OpFunction = route

    def bind(self, binding: Binding) -> None:
        shapes = {"in": self.hidden, "out": self.num_experts}
        self._linear = binding.op("linear", shapes=shapes, dtype=self._pinned)
        self._route = binding.op("route", shapes={"experts": self.num_experts}, options=self._options)

    def _logits(self, x: Tensor) -> Tensor:
        """[T, experts], in the dtype of the weight where that is pinned."""
        logits: Tensor = self._linear(x if self._pinned is None else x.to(self._pinned), self.weight, self.bias)
        return logits


class TopKRouter(_Router):
    """x [T, hidden] -> weights [T, k], ids [T, k] int64; `weight` [experts, hidden].

    `bias` adds `e_score_correction_bias` [experts], float32; `gate_bias` adds `bias` [experts] to the product
    (gpt-oss). The other arguments are those of the op `route`. `dtype` pins the weight and the product (float32 for
    DeepSeek-V3 and its kin); the weights come out in its dtype, or, with `wide`, in float32 whatever the product's
    (Mixtral and its kin).
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        renormalize: bool,
        renormalize_eps: float = 0.0,
        scale: float = 1.0,
        bias: bool = False,
        groups: int = 1,
        top_groups: int = 1,
        group_score: str = "top2",
        choose_by: str = "scores",
        soft_cap: float | None = None,
        jitter: float = 0.0,
        gate_bias: bool = False,
        dtype: torch.dtype | None = None,
        wide: bool = False,
    ) -> None:
        super().__init__(
            hidden,
            num_experts,
            k=top_k,
            dtype=dtype,
            score=score,
            renormalize=renormalize,
            renormalize_eps=renormalize_eps,
            scale=scale,
            groups=groups,
            top_groups=top_groups,
            group_score=group_score,
            choose_by=choose_by,
            soft_cap=soft_cap,
            jitter=jitter,
            gate_bias=gate_bias,
        )
        self.e_score_correction_bias = parameter(num_experts, dtype=torch.float32) if bias else None
        self._wide = wide

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._logits(x).float() if self._wide else self._logits(x)
        weights, ids = self._route(logits, self.e_score_correction_bias, **self._options)
        return weights, ids


class HashRouter(_Router):
    """x [T, hidden], token ids [T] -> weights [T, k], ids [T, k] int64.

    A table says which experts serve a token, `tid2eid` [vocabulary, k] int64, and the gate's `weight`
    [experts, hidden] how much each counts (DeepSeek-V4). Arguments as those of `TopKRouter`.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        vocabulary: int,
        *,
        score: str = "softmax",
        renormalize: bool,
        renormalize_eps: float = 0.0,
        scale: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden,
            num_experts,
            k=top_k,
            dtype=dtype,
            score=score,
            renormalize=renormalize,
            renormalize_eps=renormalize_eps,
            scale=scale,
        )
        self.tid2eid = parameter(vocabulary, top_k, dtype=torch.int64)

    def forward(self, x: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self._route(self._logits(x), None, ids=self.tid2eid[input_ids], **self._options)
        return weights, ids


class Experts(Component):
    """x [T, hidden], weights and ids [T, k] -> [T, hidden].

    `gate_up_proj` [E, 2 I, hidden] (gate first), `down_proj` [E, hidden, I]; with `bias` also `gate_up_proj_bias`
    [E, 2 I] and `down_proj_bias` [E, hidden]. The rest as in `GatedMLP`.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        activation: str = "silu",
        limit: float | None = None,
        alpha: float = OAI_ALPHA,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.activation = check_activation(activation)
        self.limit = limit
        self._options = {"activation": self.activation, "limit": limit, **slope(activation, alpha)}
        self.gate_up_proj = parameter(num_experts, 2 * intermediate, hidden)
        self.down_proj = parameter(num_experts, hidden, intermediate)
        self.gate_up_proj_bias = parameter(num_experts, 2 * intermediate) if bias else None
        self.down_proj_bias = parameter(num_experts, hidden) if bias else None
        self._op: OpFunction = experts

    def bind(self, binding: Binding) -> None:
        num, hidden, intermediate = self.down_proj.shape
        shapes = {"experts": num, "hidden": hidden, "intermediate": intermediate}
        self._op = binding.op("experts", shapes=shapes, options=self._options)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        biases = {"gate_up_bias": self.gate_up_proj_bias, "down_bias": self.down_proj_bias}
        given = {name: bias for name, bias in biases.items() if bias is not None}
        out: Tensor = self._op(x, weights, ids, self.gate_up_proj, self.down_proj, **given, **self._options)
        return out
