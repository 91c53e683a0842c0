"""GLM-4-0414 and GLM-Z1 (`Glm4ForCausalLM`); reads beside transformers' modeling_glm4.py.

GLM with a norm behind each block as well as before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components import RMSNorm
from rtp_runtime.weights import WeightDescriptors

from .glm import (
    GlmDecoderLayer,
    GlmForCausalLM,
    GlmModel,
    PositionEmbeddings,
    attention_weights,
    fused_mlp_weights,
    norm_weights,
    outer_weights,
    state_descriptors,
)

__all__ = ["Glm4ForCausalLM", "state_descriptors", "weight_descriptors"]


class Glm4DecoderLayer(GlmDecoderLayer):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        self.post_self_attn_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_mlp_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        position_embeddings: PositionEmbeddings,
        batch: ForwardBatch,
        state: Mapping[str, StateView],
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), position_embeddings, batch, state["kv"])
        hidden = hidden + self.post_self_attn_layernorm(attended)
        output: Tensor = hidden + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(hidden)))
        return output


class Glm4Model(GlmModel):
    decoder_layer = Glm4DecoderLayer


class Glm4ForCausalLM(GlmForCausalLM):
    model_class = Glm4Model


def weight_descriptors(config: Any) -> WeightDescriptors:
    return WeightDescriptors(
        *outer_weights(config),
        *norm_weights(config, "post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"),
        *attention_weights(config),
        *fused_mlp_weights(config),
    )
