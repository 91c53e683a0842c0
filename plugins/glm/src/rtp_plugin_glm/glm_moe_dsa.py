"""GLM-5, 5.1 and 5.2 (`GlmMoeDsaForCausalLM`); reads beside transformers' modeling_glm_moe_dsa.py.

GLM-4.7-Flash whose queries attend to the tokens that an indexer selects; some layers take the selection of the last
layer that has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rtp_kernel.batch import ForwardBatch, ModelState, StateView
from rtp_kernel.components import TokenIndexer
from rtp_kernel.registry import Support
from rtp_runtime.state import PagedState, StateDescriptors
from rtp_runtime.weights import Descriptor, FromCheckpoint, Weight, WeightDescriptors

from .glm import LAYER, GlmForCausalLM, PositionEmbeddings, all_layers, outer_weights
from .glm4_moe import moe_weight_descriptors, routing_reason
from .glm4_moe_lite import (
    Glm4MoeLiteAttention,
    Glm4MoeLiteDecoderLayer,
    Glm4MoeLiteModel,
    latent_attention_weights,
    latent_state,
    own_names,
    sparse_layers,
)


def skips_topk(config: Any, layer: int) -> bool:
    """Whether the layer has no indexer and takes the selection of the layer before it."""
    return bool(config.indexer_types[layer] == "shared")


class GlmMoeDsaAttention(Glm4MoeLiteAttention):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config)
        self.indexer = None if skips_topk(config, layer) else self.make_indexer(config)

    @staticmethod
    def make_indexer(config: Any) -> TokenIndexer:
        return TokenIndexer(
            config.hidden_size,
            config.q_lora_rank,
            config.index_n_heads,
            config.index_head_dim,
            config.index_topk,
            rope_layout="interleaved_to_half",
        )

    @staticmethod
    def rotary_layout(config: Any) -> str:
        return "interleaved_to_half"

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        position_embeddings: PositionEmbeddings,
        batch: ForwardBatch,
        state: Mapping[str, StateView],
        prev_topk_indices: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        q_resid = self.q_a_layernorm(self.q_a_proj(hidden))
        q = self.q_b_proj(q_resid)
        if self.indexer is None:
            assert prev_topk_indices is not None  # `accepts` has seen that the first layer selects
            topk_indices = prev_topk_indices
        else:
            topk_indices = self.indexer(hidden, q_resid, position_embeddings, batch, state["index"])
        return self.attend(q, hidden, position_embeddings, batch, state["latent"], topk_indices), topk_indices


class GlmMoeDsaDecoderLayer(Glm4MoeLiteDecoderLayer):
    @classmethod
    def make_attention(cls, config: Any, layer: int) -> nn.Module:
        return GlmMoeDsaAttention(config, layer)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        position_embeddings: PositionEmbeddings,
        batch: ForwardBatch,
        state: Mapping[str, StateView],
        prev_topk_indices: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        attended, topk_indices = self.self_attn(
            self.input_layernorm(hidden), position_embeddings, batch, state, prev_topk_indices
        )
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), topk_indices


class GlmMoeDsaModel(Glm4MoeLiteModel):
    decoder_layer = GlmMoeDsaDecoderLayer

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden = self.embed_tokens(batch.input_ids)  # [tokens, hidden]
        position_embeddings = self.rotary_emb(batch.positions)
        topk_indices = None  # [tokens, 1, k], of the last layer with an indexer
        for layer, layer_state in zip(self.layers, state, strict=True):
            hidden, topk_indices = layer(hidden, position_embeddings, batch, layer_state, topk_indices)
        output: Tensor = self.norm(hidden)
        return output


class GlmMoeDsaForCausalLM(GlmForCausalLM):
    model_class = GlmMoeDsaModel


def accepts(config: Any) -> Support:
    reason = "indexer_types begins with a layer that shares a selection, and there is none before it"
    return Support.unless(skips_topk(config, 0) and reason, routing_reason(config))


def indexer_layers(config: Any) -> list[int]:
    return [layer for layer in range(config.num_hidden_layers) if not skips_topk(config, layer)]


def indexer_weights(config: Any, layers: list[int]) -> list[Descriptor]:
    """Each under its own name. The heads' weights are float32 whatever the model's dtype."""
    prefix, over = LAYER + "self_attn.indexer.", {"layer": layers}
    heads, dim, hidden = config.index_n_heads, config.index_head_dim, config.hidden_size
    shapes = {
        "wq_b.weight": (heads * dim, config.q_lora_rank),
        "wk.weight": (dim, hidden),
        "k_norm.weight": (dim,),
        "k_norm.bias": (dim,),
    }
    name = prefix + "weights_proj.weight"
    weights = Weight(parameter=name, source=FromCheckpoint(name, (heads, hidden)), over=over, dtype="float32")
    return [*own_names(prefix, shapes, over), weights]


def weight_descriptors(config: Any) -> WeightDescriptors:
    attention = latent_attention_weights(config, all_layers(config))
    common = [*outer_weights(config), *attention, *indexer_weights(config, indexer_layers(config))]
    return moe_weight_descriptors(config, common, sparse_layers(config))


def state_descriptors(config: Any) -> StateDescriptors:
    """Latents in every layer, index keys where there is an indexer."""
    index = PagedState(axes={"index": config.index_head_dim})
    latent = latent_state(config)
    return StateDescriptors(
        [
            {"latent": latent} if skips_topk(config, layer) else {"latent": latent, "index": index}
            for layer in range(config.num_hidden_layers)
        ]
    )
