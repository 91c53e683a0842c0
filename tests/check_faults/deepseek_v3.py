"""Copies of the DeepSeek-V3 model with one fault each."""

from __future__ import annotations

from typing import Any

from rtp_plugin_deepseek.deepseek_v3 import DeepseekV3ForCausalLM, state_descriptors, weight_descriptors

from rtp_kernel.batch import Build

__all__ = ["state_descriptors", "weight_descriptors"]


class ConfigEps(DeepseekV3ForCausalLM):
    """The low-rank query's norm takes the config's eps, here 1e-5, for its own 1e-6."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[1].self_attn.q_a_layernorm.eps = 1e-5
