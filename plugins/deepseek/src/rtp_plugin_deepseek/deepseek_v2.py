"""DeepSeek-V2 and V2-Lite (`DeepseekV2ForCausalLM`); reads beside transformers' modeling_deepseek_v2.py.

Latent attention over dense layers and then routed experts with shared ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rtp_kernel.batch import Build, ForwardBatch, ModelState, StateView
from rtp_kernel.components import (
    Embedding,
    Experts,
    GatedMLP,
    LatentAttention,
    LatentUp,
    Linear,
    RMSNorm,
    Rotary,
    RotaryEmbedding,
    TopKRouter,
)
from rtp_kernel.registry import Support
from rtp_runtime.model import rope_parameters
from rtp_runtime.state import PagedState, StateDescriptors
from rtp_runtime.weights import WeightDescriptors

from .weights import attention_weights, moe_weights, outer_weights, with_experts

Rotation = tuple[Tensor, Tensor]
"""cos and sin of the step's positions, [tokens, rotated dim] each."""

LATENT_EPS = 1e-6
"""Of the norms of both latents, whatever the config's `rms_norm_eps`."""


def sparse_layers(config: Any) -> list[int]:
    """The layers that route to experts; the others have one dense MLP."""
    return list(range(config.first_k_dense_replace, config.num_hidden_layers))


class DeepseekV2Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, hidden, bias = config.num_attention_heads, config.hidden_size, config.attention_bias
        self.num_heads = heads
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.head_dim, self.latent_dim = self.nope_dim + self.rope_dim, config.kv_lora_rank
        self.q_lora_rank = config.q_lora_rank
        if self.q_lora_rank is None:
            self.q_proj = Linear(hidden, heads * self.head_dim)
        else:
            self.q_a_proj = Linear(hidden, self.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(self.q_lora_rank, LATENT_EPS)
            self.q_b_proj = Linear(self.q_lora_rank, heads * self.head_dim)
        self.kv_a_proj_with_mqa = Linear(hidden, self.latent_dim + self.rope_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.latent_dim, LATENT_EPS)
        self.kv_b_proj = LatentUp(self.latent_dim, heads, self.nope_dim, config.v_head_dim)
        self.o_proj = Linear(heads * config.v_head_dim, hidden, bias=bias)
        self.rotary = Rotary(self.rope_layout(config))
        scale = self.head_dim**-0.5 * rope_parameters(config).softmax_factor()
        self.attn = LatentAttention(
            heads, self.latent_dim, self.nope_dim, self.rope_dim, config.v_head_dim, scale=scale
        )

    @staticmethod
    def rope_layout(config: Any) -> str:
        return "interleaved"

    def queries(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """[tokens, heads * head dim], and what they were made of, [tokens, rank], where queries are of low rank."""
        if self.q_lora_rank is None:
            return self.q_proj(hidden), None
        q_resid = self.q_a_layernorm(self.q_a_proj(hidden))
        return self.q_b_proj(q_resid), q_resid

    def select(
        self,
        hidden: Tensor,
        q_resid: Tensor | None,
        rotation: Rotation,
        batch: ForwardBatch,
        state: Mapping[str, StateView],
    ) -> Tensor | None:
        """The tokens that each token attends to, [tokens, 1, k]; None = all before it."""
        return None

    def forward(
        self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch, state: Mapping[str, StateView]
    ) -> Tensor:
        q, q_resid = self.queries(hidden)
        q = q.view(len(hidden), self.num_heads, self.head_dim)  # [tokens, heads, head dim]
        q_nope, q_rope = torch.split_with_sizes(q, [self.nope_dim, self.rope_dim], dim=-1)
        compressed = self.kv_a_proj_with_mqa(hidden)
        latent, k_rope = torch.split_with_sizes(compressed, [self.latent_dim, self.rope_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)  # [tokens, latent dim]
        q_rope, k_rope = self.rotary(q_rope, k_rope.unsqueeze(1), *rotation)
        q_rope, k_rope = q_rope.to(hidden.dtype), k_rope.squeeze(1).to(hidden.dtype)
        selection = self.select(hidden, q_resid, rotation, batch, state)
        output: Tensor = self.o_proj(
            self.attn(q_nope, q_rope, latent, k_rope, self.kv_b_proj, batch, state["latent"], selection)
        )
        return output


class DeepseekV2TopkRouter(TopKRouter):
    """Softmax in float32 over a float32 weight; the chosen weights are not renormalised, whatever the config says."""

    def __init__(self, config: Any) -> None:
        limited = config.topk_method == "group_limited_greedy"
        super().__init__(
            config.hidden_size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            score="softmax",
            renormalize=False,
            scale=config.routed_scaling_factor,
            groups=config.n_group if limited else 1,
            top_groups=config.topk_group if limited else 1,
            group_score="max",
            dtype=torch.float32,
        )


class DeepseekV2Moe(nn.Module):
    router: ClassVar[type[nn.Module]] = DeepseekV2TopkRouter

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.moe_intermediate_size
        self.experts = Experts(config.n_routed_experts, hidden, intermediate, config.hidden_act)
        self.gate = self.router(config)
        self.shared_experts = self.make_mlp(config, intermediate * config.n_shared_experts)

    @staticmethod
    def make_mlp(config: Any, intermediate: int) -> nn.Module:
        return GatedMLP(config.hidden_size, intermediate, config.hidden_act, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        weights, ids = self.gate(hidden)  # [tokens, experts per token]
        output: Tensor = self.experts(hidden, weights, ids) + self.shared_experts(hidden)
        return output


class DeepseekV2DecoderLayer(nn.Module):
    attention: ClassVar[type[nn.Module]] = DeepseekV2Attention
    moe: ClassVar[type[DeepseekV2Moe]] = DeepseekV2Moe

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.self_attn = self.attention(config)
        sparse = layer in self.sparse_layers(config)
        self.mlp = self.moe(config) if sparse else self.moe.make_mlp(config, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @staticmethod
    def sparse_layers(config: Any) -> list[int]:
        return sparse_layers(config)

    def forward(
        self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch, state: Mapping[str, StateView]
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, batch, state)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class DeepseekV2Model(nn.Module):
    decoder_layer: ClassVar[type[nn.Module]] = DeepseekV2DecoderLayer
    rotary_dtype: ClassVar[torch.dtype | None] = torch.float32
    """The reference turns queries and keys in float32, as complex numbers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.decoder_layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config.qk_rope_head_dim, rope_parameters(config), self.rotary_dtype)

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden = self.embed_tokens(batch.input_ids)  # [tokens, hidden]
        rotation = self.rotary_emb(batch.positions)
        for layer, layer_state in zip(self.layers, state, strict=True):
            hidden = layer(hidden, rotation, batch, layer_state)
        output: Tensor = self.norm(hidden)
        return output


class DeepseekV2ForCausalLM(nn.Module):
    model_class: ClassVar[type[nn.Module]] = DeepseekV2Model

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__()
        self.model = self.model_class(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden: Tensor = self.model(batch, state)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab]."""
        logits: Tensor = self.lm_head(hidden)
        return logits


METHODS = ("greedy", "group_limited_greedy")


def too_few_choices(config: Any) -> str:
    """Why the best groups cannot serve a token, or nothing."""
    choices = config.topk_group * (config.n_routed_experts // config.n_group)
    needed = config.num_experts_per_tok
    if choices >= needed:
        return ""
    return f"num_experts_per_tok is {needed}; the best topk_group = {config.topk_group} groups hold {choices} experts"


def accepts(config: Any) -> Support:
    method = config.topk_method
    score = getattr(config, "scoring_func", "softmax")
    return Support.unless(
        method not in METHODS and f'topk_method is "{method}"; the router knows {", ".join(METHODS)}',
        score != "softmax" and f'scoring_func is "{score}"; the router takes a softmax',
        method == METHODS[1] and too_few_choices(config),
    )


def weight_descriptors(config: Any) -> WeightDescriptors:
    common = [
        *outer_weights(config),
        *attention_weights(config),
        *moe_weights(config, sparse_layers(config), mlp_bias=config.mlp_bias),
    ]
    return with_experts(config, common, sparse_layers(config))


def latent_state(config: Any) -> PagedState:
    """Per token the normalised latent and, behind it, the rotated key that all heads share."""
    return PagedState(axes={"latent": config.kv_lora_rank + config.qk_rope_head_dim})


def state_descriptors(config: Any) -> StateDescriptors:
    return StateDescriptors([{"latent": latent_state(config)} for _ in range(config.num_hidden_layers)])
