"""DeepSeek-V3.2 (`DeepseekV32ForCausalLM`); reads beside transformers' modeling_deepseek_v32.py.

DeepSeek-V3 with an indexer in every layer, which selects the tokens that attention sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components import TokenIndexer
from rtp_runtime.state import PagedState, StateDescriptors
from rtp_runtime.weights import Descriptor, WeightDescriptors

from .deepseek_v2 import Rotation, latent_state
from .deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3DecoderLayer,
    DeepseekV3ForCausalLM,
    DeepseekV3Model,
    accepts,
    moe_descriptors,
)
from .weights import LAYER, all_layers, attention_weights, outer_weights, plain

__all__ = ["DeepseekV32ForCausalLM", "accepts", "state_descriptors", "weight_descriptors"]


class DeepseekV32Attention(DeepseekV3Attention):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.indexer = TokenIndexer(
            config.hidden_size,
            config.q_lora_rank,
            config.index_n_heads,
            config.index_head_dim,
            config.index_topk,
            rope_layout="half",
        )

    @staticmethod
    def rope_layout(config: Any) -> str:
        return "interleaved_to_half"

    def select(
        self,
        hidden: Tensor,
        q_resid: Tensor | None,
        rotation: Rotation,
        batch: ForwardBatch,
        state: Mapping[str, StateView],
    ) -> Tensor | None:
        selection: Tensor = self.indexer(hidden, q_resid, rotation, batch, state["index"])
        return selection


def sparse_layers(config: Any) -> list[int]:
    """The layers that route to experts; the others have one dense MLP."""
    return [layer for layer in range(config.num_hidden_layers) if config.mlp_layer_types[layer] == "sparse"]


class DeepseekV32DecoderLayer(DeepseekV3DecoderLayer):
    attention = DeepseekV32Attention

    @staticmethod
    def sparse_layers(config: Any) -> list[int]:
        return sparse_layers(config)


class DeepseekV32Model(DeepseekV3Model):
    decoder_layer = DeepseekV32DecoderLayer


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    model_class = DeepseekV32Model


def indexer_weights(config: Any) -> list[Descriptor]:
    """The head weights stay in float32, as in the released code."""
    hidden, heads, dim = config.hidden_size, config.index_n_heads, config.index_head_dim
    prefix, layers = LAYER + "self_attn.indexer.", all_layers(config)
    return [
        plain(prefix + "wq_b.weight", heads * dim, config.q_lora_rank, over=layers),
        plain(prefix + "wk.weight", dim, hidden, over=layers),
        plain(prefix + "k_norm.weight", dim, over=layers),
        plain(prefix + "k_norm.bias", dim, over=layers),
        plain(prefix + "weights_proj.weight", heads, hidden, over=layers, dtype="float32"),
    ]


def weight_descriptors(config: Any) -> WeightDescriptors:
    common = [*outer_weights(config), *attention_weights(config), *indexer_weights(config)]
    return moe_descriptors(config, common, sparse_layers(config))


def state_descriptors(config: Any) -> StateDescriptors:
    index = PagedState(axes={"index": config.index_head_dim})
    return StateDescriptors([{"latent": latent_state(config), "index": index} for _ in range(config.num_hidden_layers)])
