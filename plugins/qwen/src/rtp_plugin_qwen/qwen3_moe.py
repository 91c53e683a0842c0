"""Qwen3-MoE (`Qwen3MoeForCausalLM`); reads beside transformers' modeling_qwen3_moe.py.

Qwen3's attention over Qwen2-MoE's routed experts, without a shared expert. A window, where set, holds for every layer.
"""

from __future__ import annotations

from typing import Any

from rtp_runtime.state import StateDescriptors
from rtp_runtime.weights import WeightDescriptors

from .qwen2 import Qwen2ForCausalLM, Qwen2Model, attention_weights, kv_state, outer_weights
from .qwen2_moe import (
    Qwen2MoeDecoderLayer,
    RoutedExperts,
    dense_mlp_weights,
    moe_weight_descriptors,
    sparse_layers,
)
from .qwen3 import Qwen3Attention, qk_norm_weights

__all__ = ["Qwen3MoeForCausalLM", "state_descriptors", "weight_descriptors"]


class Qwen3MoeAttention(Qwen3Attention):
    @staticmethod
    def window(config: Any, layer: int) -> int | None:
        window: int | None = config.sliding_window
        return window


class Qwen3MoeSparseMoeBlock(RoutedExperts):
    """Nothing beside the routed experts."""


class Qwen3MoeDecoderLayer(Qwen2MoeDecoderLayer):
    attention = Qwen3MoeAttention
    sparse_block = Qwen3MoeSparseMoeBlock


class Qwen3MoeModel(Qwen2Model):
    decoder_layer = Qwen3MoeDecoderLayer


class Qwen3MoeForCausalLM(Qwen2ForCausalLM):
    model_class = Qwen3MoeModel


def weight_descriptors(config: Any) -> WeightDescriptors:
    attention = attention_weights(config, qkv_bias=config.attention_bias, output_bias=config.attention_bias)
    common = [*outer_weights(config), *attention, *qk_norm_weights(config), *dense_mlp_weights(config)]
    return moe_weight_descriptors(config, common, sparse_layers(config))


def state_descriptors(config: Any) -> StateDescriptors:
    return StateDescriptors([{"kv": kv_state(config, config.sliding_window)} for _ in range(config.num_hidden_layers)])
