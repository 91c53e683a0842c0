"""Copies of the DeepSeek-V3 model with one fault each."""

from __future__ import annotations

from typing import Any

import torch
from rtp_plugin_deepseek.deepseek_v3 import DeepseekV3ForCausalLM, state_descriptors, weight_descriptors
from torch import Tensor

from rtp_kernel.batch import Build
from rtp_kernel.components import TopKRouter

__all__ = ["state_descriptors", "weight_descriptors"]


class ConfigEps(DeepseekV3ForCausalLM):
    """The low-rank query's norm takes the config's eps, here 1e-5, for its own 1e-6."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[1].self_attn.q_a_layernorm.eps = 1e-5


class NarrowLogits(TopKRouter):
    """Logits in the dtype of the hidden state, where the weight is float32."""

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = torch.nn.functional.linear(x, self.weight.to(x.dtype)).to(self.weight.dtype)
        return logits


class NarrowRouter(DeepseekV3ForCausalLM):
    """A router that follows the model's dtype, where it is kept in float32."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        for layer in self.model.layers:
            gate = getattr(layer.mlp, "gate", None)
            if isinstance(gate, TopKRouter):
                gate.__class__ = NarrowLogits
