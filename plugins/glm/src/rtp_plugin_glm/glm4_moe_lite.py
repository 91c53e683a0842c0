"""GLM-4.7-Flash (`Glm4MoeLiteForCausalLM`); reads beside transformers' modeling_glm4_moe_lite.py.

DeepSeek-V3's latent attention over GLM-4.5's experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components import GatedMLP, LatentAttention, LatentUp, Linear, RMSNorm, Rotary
from rtp_runtime.model import rope_parameters
from rtp_runtime.state import PagedState, StateDescriptors
from rtp_runtime.weights import Axis, Descriptor, FromCheckpoint, Weight, WeightDescriptors

from .glm import LAYER, GlmForCausalLM, GlmModel, PositionEmbeddings, all_layers, outer_weights, turned_part
from .glm4_moe import Glm4MoeMoE, accepts, moe_weight_descriptors

__all__ = ["Glm4MoeLiteForCausalLM", "accepts", "state_descriptors", "weight_descriptors"]

LATENT_NORM_EPS = 1e-6
"""Of the norms between the low-rank projections; the reference gives them their default, not the config's eps."""


class Glm4MoeLiteAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, rank, bias = config.hidden_size, config.kv_lora_rank, config.attention_bias
        self.num_heads = config.num_attention_heads
        self.q_lora_rank = config.q_lora_rank
        self.query_parts = [config.qk_nope_head_dim, config.qk_rope_head_dim]
        self.latent_parts = [rank, config.qk_rope_head_dim]
        q_size = self.num_heads * sum(self.query_parts)
        if self.q_lora_rank is None:
            self.q_proj = Linear(hidden, q_size)
        else:
            self.q_a_proj = Linear(hidden, self.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(self.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(self.q_lora_rank, q_size)
        self.kv_a_proj_with_mqa = Linear(hidden, sum(self.latent_parts), bias=bias)
        self.kv_a_layernorm = RMSNorm(rank, LATENT_NORM_EPS)
        self.kv_b_proj = LatentUp(rank, self.num_heads, config.qk_nope_head_dim, config.v_head_dim)
        self.o_proj = Linear(self.num_heads * config.v_head_dim, hidden, bias=bias)
        self.rotary = Rotary(self.rotary_layout(config))
        scale = sum(self.query_parts) ** -0.5 * rope_parameters(config).softmax_factor()
        self.attn = LatentAttention(
            self.num_heads, rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, scale=scale
        )

    @staticmethod
    def rotary_layout(config: Any) -> str:
        return "interleaved_to_half" if config.rope_interleave else "half"

    def forward(
        self,
        hidden: Tensor,
        position_embeddings: PositionEmbeddings,
        batch: ForwardBatch,
        state: Mapping[str, StateView],
    ) -> Tensor:
        if self.q_lora_rank is None:
            q = self.q_proj(hidden)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        return self.attend(q, hidden, position_embeddings, batch, state["latent"])

    def attend(
        self,
        q: Tensor,
        hidden: Tensor,
        position_embeddings: PositionEmbeddings,
        batch: ForwardBatch,
        latents: StateView,
        selection: Tensor | None = None,
    ) -> Tensor:
        """q [tokens, heads * (Dn + Dr)] over the latents of all tokens, or of those selected -> [tokens, hidden]."""
        q = q.view(-1, self.num_heads, sum(self.query_parts))  # [tokens, heads, Dn + Dr]
        q_pass, q_rot = torch.split_with_sizes(q, self.query_parts, dim=-1)
        k_pass, k_rot = torch.split_with_sizes(self.kv_a_proj_with_mqa(hidden), self.latent_parts, dim=-1)
        k_pass = self.kv_a_layernorm(k_pass)
        q_rot, k_rot = self.rotary(q_rot, k_rot[:, None], *position_embeddings)
        attended = self.attn(q_pass, q_rot, k_pass, k_rot[:, 0], self.kv_b_proj, batch, latents, selection)
        output: Tensor = self.o_proj(attended)
        return output


class Glm4MoeLiteDecoderLayer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.self_attn = self.make_attention(config, layer)
        if config.mlp_layer_types[layer] == "sparse":
            self.mlp: nn.Module = Glm4MoeMoE(config)
        else:
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @classmethod
    def make_attention(cls, config: Any, layer: int) -> nn.Module:
        return Glm4MoeLiteAttention(config)

    def forward(
        self,
        hidden: Tensor,
        position_embeddings: PositionEmbeddings,
        batch: ForwardBatch,
        state: Mapping[str, StateView],
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), position_embeddings, batch, state)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Glm4MoeLiteModel(GlmModel):
    decoder_layer = Glm4MoeLiteDecoderLayer

    @staticmethod
    def rotary_dim(config: Any) -> int:
        return turned_part(config, config.qk_rope_head_dim)


class Glm4MoeLiteForCausalLM(GlmForCausalLM):
    model_class = Glm4MoeLiteModel


def latent_attention_weights(config: Any, over: Mapping[str, Any]) -> list[Descriptor]:
    """The projections of latent attention, each under its own name; queries by a low rank or at once."""
    hidden, rank, q_rank = config.hidden_size, config.kv_lora_rank, config.q_lora_rank
    heads, query = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    q_heads, values = Axis("q heads", heads, query), Axis("q heads", heads, config.v_head_dim)
    up = Axis("q heads", heads, config.qk_nope_head_dim + config.v_head_dim)
    latent = rank + config.qk_rope_head_dim
    shapes: dict[str, tuple[int | Axis, ...]] = {
        "kv_a_proj_with_mqa.weight": (latent, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (up, rank),
        "o_proj.weight": (hidden, values),
    }
    if q_rank is None:
        shapes["q_proj.weight"] = (q_heads, hidden)
    else:
        shapes |= {"q_a_proj.weight": (q_rank, hidden), "q_a_layernorm.weight": (q_rank,)}
        shapes["q_b_proj.weight"] = (q_heads, q_rank)
    if config.attention_bias:
        shapes |= {"kv_a_proj_with_mqa.bias": (latent,), "o_proj.bias": (hidden,)}
        shapes |= {} if q_rank is None else {"q_a_proj.bias": (q_rank,)}
    return own_names(LAYER + "self_attn.", shapes, over)


def own_names(prefix: str, shapes: Mapping[str, tuple[int | Axis, ...]], over: Mapping[str, Any]) -> list[Descriptor]:
    """Parameters that are tensors of the checkpoint, under the same names behind `prefix`."""
    return [
        Weight(parameter=prefix + name, source=FromCheckpoint(prefix + name, dims), over=over)
        for name, dims in shapes.items()
    ]


def sparse_layers(config: Any) -> list[int]:
    """The layers that route to experts."""
    return [layer for layer in range(config.num_hidden_layers) if config.mlp_layer_types[layer] == "sparse"]


def weight_descriptors(config: Any) -> WeightDescriptors:
    common = [*outer_weights(config), *latent_attention_weights(config, all_layers(config))]
    return moe_weight_descriptors(config, common, sparse_layers(config))


def latent_state(config: Any) -> PagedState:
    """The normalised latent and the turned key that all heads share, per token."""
    return PagedState(axes={"latent": config.kv_lora_rank + config.qk_rope_head_dim})


def state_descriptors(config: Any) -> StateDescriptors:
    return StateDescriptors([{"latent": latent_state(config)} for _ in range(config.num_hidden_layers)])
