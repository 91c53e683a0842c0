"""Qwen3, dense (`Qwen3ForCausalLM`); reads beside transformers' modeling_qwen3.py.

Qwen2 with per-head norms on q and k, a head dimension of its own, and biases by config.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components import RMSNorm
from rtp_runtime.weights import Descriptor, FromCheckpoint, Weight, WeightDescriptors

from .qwen2 import (
    LAYER,
    Qwen2Attention,
    Qwen2DecoderLayer,
    Qwen2ForCausalLM,
    Qwen2Model,
    Rotation,
    attention_weights,
    head_dim,
    mlp_weights,
    outer_weights,
    state_descriptors,
)

__all__ = ["Qwen3ForCausalLM", "state_descriptors", "weight_descriptors"]


class Qwen3Attention(Qwen2Attention):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    @staticmethod
    def biases(config: Any) -> tuple[bool, bool]:
        return config.attention_bias, config.attention_bias

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch, kv: StateView) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj(hidden))  # [tokens, heads, dim]
        q, k = self.rotary(self.q_norm(q), self.k_norm(k), *rotation)
        output: Tensor = self.o_proj(self.attn(q, k, v, batch, kv))
        return output


class Qwen3DecoderLayer(Qwen2DecoderLayer):
    attention = Qwen3Attention


class Qwen3Model(Qwen2Model):
    decoder_layer = Qwen3DecoderLayer


class Qwen3ForCausalLM(Qwen2ForCausalLM):
    model_class = Qwen3Model


def qk_norm_weights(config: Any) -> list[Descriptor]:
    names = (LAYER + "self_attn.q_norm.weight", LAYER + "self_attn.k_norm.weight")
    over = {"layer": range(config.num_hidden_layers)}
    return [Weight(parameter=name, source=FromCheckpoint(name, (head_dim(config),)), over=over) for name in names]


def weight_descriptors(config: Any) -> WeightDescriptors:
    layers = {"layer": range(config.num_hidden_layers)}
    return WeightDescriptors(
        *outer_weights(config),
        *attention_weights(config, qkv_bias=config.attention_bias, output_bias=config.attention_bias),
        *qk_norm_weights(config),
        *mlp_weights(LAYER + "mlp.", config.hidden_size, config.intermediate_size, layers),
    )
