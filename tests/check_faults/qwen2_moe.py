"""Copies of the Qwen2-MoE model with one fault each."""

from __future__ import annotations

from typing import Any

from rtp_plugin_qwen.qwen2_moe import (
    Qwen2MoeForCausalLM,
    Qwen2MoeSparseMoeBlock,
    state_descriptors,
    weight_descriptors,
)
from torch import Tensor

from rtp_kernel.batch import Build

__all__ = ["state_descriptors", "weight_descriptors"]


class UngatedSharedExpert(Qwen2MoeSparseMoeBlock):
    def forward(self, hidden: Tensor) -> Tensor:
        weights, ids = self.gate(hidden)
        output: Tensor = self.experts(hidden, weights, ids) + self.shared_expert(hidden)
        return output


class NoSharedGate(Qwen2MoeForCausalLM):
    """The shared expert without its sigmoid gate."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[2].mlp = UngatedSharedExpert(config)


class LeakySharedExpert(Qwen2MoeSparseMoeBlock):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + 1e-5 * hidden


class LeakyBlock(Qwen2MoeForCausalLM):
    """A little of the block's input in its output."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[0].mlp = LeakySharedExpert(config)
