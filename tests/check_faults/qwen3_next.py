"""Copies of the Qwen3-Next model with one fault each."""

from __future__ import annotations

from typing import Any

from rtp_plugin_qwen.qwen3_next import Qwen3NextForCausalLM, state_descriptors, weight_descriptors

from rtp_kernel.batch import Build
from rtp_kernel.components import Gate, RMSNorm

__all__ = ["state_descriptors", "weight_descriptors"]


class SiluGate(Qwen3NextForCausalLM):
    """The gate of attention's output is silu, not sigmoid."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[3].self_attn.output_gate = Gate("silu")


class PlainNorm(Qwen3NextForCausalLM):
    """w where the weight is 1 + w."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[1].input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
