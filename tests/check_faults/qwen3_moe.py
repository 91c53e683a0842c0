"""Copies of the Qwen3-MoE model with one fault each."""

from __future__ import annotations

from typing import Any

from rtp_plugin_qwen.qwen3_moe import Qwen3MoeForCausalLM, state_descriptors, weight_descriptors
from torch import Tensor

from rtp_kernel.batch import Build
from rtp_kernel.components import Experts, TopKRouter

__all__ = ["state_descriptors", "weight_descriptors"]


class NoRenormalisation(Qwen3MoeForCausalLM):
    """Weights of the chosen experts that do not add up to one."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[2].mlp.gate = TopKRouter(
            config.hidden_size, config.num_experts, config.num_experts_per_tok, renormalize=False
        )


class NarrowRouter(TopKRouter):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = (x.bfloat16() @ self.weight.bfloat16().T).to(x)
        weights, ids = self._route(logits, None, **self._options)
        return weights, ids


class RouterInBfloat16(Qwen3MoeForCausalLM):
    """A router computed in a low precision."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[0].mlp.gate = NarrowRouter(
            config.hidden_size, config.num_experts, config.num_experts_per_tok, renormalize=True
        )


class ShiftedExperts(Experts):
    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return super().forward(x, weights, (ids + 1) % self.gate_up_proj.shape[0])


class ExpertOrder(Qwen3MoeForCausalLM):
    """Experts that are off by one."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[0].mlp.experts = ShiftedExperts(
            config.num_experts, config.hidden_size, config.moe_intermediate_size, config.hidden_act
        )
