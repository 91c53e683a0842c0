"""DeepSeek-V3, V3.1 and R1 (`DeepseekV3ForCausalLM`); reads beside transformers' modeling_deepseek_v3.py.

DeepSeek-V2 whose router takes sigmoids and chooses with a bias that is in no weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rtp_kernel.components import GatedMLP, TopKRouter
from rtp_kernel.registry import Support
from rtp_runtime.weights import WeightDescriptors

from .deepseek_v2 import (
    DeepseekV2Attention,
    DeepseekV2DecoderLayer,
    DeepseekV2ForCausalLM,
    DeepseekV2Model,
    DeepseekV2Moe,
    sparse_layers,
    state_descriptors,
    too_few_choices,
)
from .weights import attention_weights, moe_weights, outer_weights, with_experts

__all__ = ["DeepseekV3ForCausalLM", "accepts", "state_descriptors", "weight_descriptors"]


class DeepseekV3Attention(DeepseekV2Attention):
    @staticmethod
    def rope_layout(config: Any) -> str:
        return "interleaved_to_half" if config.rope_interleave else "half"


class DeepseekV3TopkRouter(TopKRouter):
    """Weight, bias and product are float32 whatever the model's dtype."""

    def __init__(self, config: Any) -> None:
        super().__init__(
            config.hidden_size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            score="sigmoid",
            renormalize=config.norm_topk_prob,
            renormalize_eps=1e-20,
            scale=config.routed_scaling_factor,
            bias=True,
            groups=config.n_group,
            top_groups=config.topk_group,
            dtype=torch.float32,
        )


class DeepseekV3MoE(DeepseekV2Moe):
    router = DeepseekV3TopkRouter

    @staticmethod
    def make_mlp(config: Any, intermediate: int) -> nn.Module:
        return GatedMLP(config.hidden_size, intermediate, config.hidden_act)


class DeepseekV3DecoderLayer(DeepseekV2DecoderLayer):
    attention = DeepseekV3Attention
    moe = DeepseekV3MoE


class DeepseekV3Model(DeepseekV2Model):
    decoder_layer = DeepseekV3DecoderLayer
    rotary_dtype = None


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    model_class = DeepseekV3Model


def accepts(config: Any) -> Support:
    score, method = getattr(config, "scoring_func", "sigmoid"), getattr(config, "topk_method", "noaux_tc")
    return Support.unless(
        score != "sigmoid" and f'scoring_func is "{score}"; the router takes sigmoids',
        method != "noaux_tc" and f'topk_method is "{method}"; the router knows noaux_tc',
        too_few_choices(config),
    )


def moe_descriptors(config: Any, common: list[Any], sparse: list[int]) -> WeightDescriptors:
    """`common` with dense MLPs and, of the layers `sparse`, router and experts."""
    return with_experts(config, [*common, *moe_weights(config, sparse, router_bias=True)], sparse)


def weight_descriptors(config: Any) -> WeightDescriptors:
    return moe_descriptors(config, [*outer_weights(config), *attention_weights(config)], sparse_layers(config))
