"""Copies of the DeepSeek-V3.2 model with one fault each."""

from __future__ import annotations

from typing import Any

from rtp_plugin_deepseek.deepseek_v32 import DeepseekV32ForCausalLM, state_descriptors, weight_descriptors

from rtp_kernel.batch import Build
from rtp_kernel.components import LayerNorm, Rotary

__all__ = ["state_descriptors", "weight_descriptors"]


class IndexRotary(DeepseekV32ForCausalLM):
    """The indexer turns as the attention does, not by halves."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[1].self_attn.indexer.rotary = Rotary("interleaved_to_half")


class IndexNormEps(DeepseekV32ForCausalLM):
    """Another eps in the norm of the index keys."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        indexer = self.model.layers[1].self_attn.indexer
        indexer.k_norm = LayerNorm(config.index_head_dim, 1e-4)
