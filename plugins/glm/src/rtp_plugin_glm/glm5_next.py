"""GLM-5.3-Flash (`Glm5NextForConditionalGeneration`), its text; reads beside transformers' modeling_glm5_next.py.

Kimi delta attention with latent attention between, whose indexer selects pools of tokens; no positions anywhere. The
residual has several streams. What the images' part holds is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rtp_kernel.batch import Build, ForwardBatch, ModelState, StateView
from rtp_kernel.components import (
    Activation,
    CausalConv,
    Embedding,
    GatedDeltaRule,
    GatedMLP,
    GatedRMSNorm,
    HyperConnection,
    LatentAttention,
    LatentUp,
    Linear,
    MergedLinear,
    PooledIndexer,
    RMSNorm,
    parameter,
)
from rtp_kernel.registry import Support
from rtp_runtime.model import text_config

from .glm import GlmForCausalLM
from .glm4_moe import Glm4MoeMoE, routing_reason
from .glm5_next_declarations import (
    LINEAR,
    linear_size,
    reason_against,
    skips_topk,
    state_descriptors,
    weight_descriptors,
)

__all__ = ["Glm5NextForConditionalGeneration", "accepts", "state_descriptors", "weight_descriptors"]


class Glm5NextTextForgetGate(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.linear_num_heads, config.linear_head_dim
        self.f_a_proj = Linear(config.hidden_size, self.head_dim)
        self.f_b_proj = Linear(self.head_dim, linear_size(config))
        self.dt_bias = parameter(linear_size(config), dtype=torch.float32)
        self.A_log = parameter(self.num_heads, dtype=torch.float32)
        self.safe_gate_lower_bound = config.linear_lower_bound
        self.sigmoid = Activation("sigmoid")

    def forward(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] to the log of the decay, [tokens, heads, dim] float32, at most 0."""
        g = (self.f_b_proj(self.f_a_proj(hidden)).float() + self.dt_bias).view(-1, self.num_heads, self.head_dim)
        decay_rate = torch.exp(self.A_log).view(-1, 1)
        if self.safe_gate_lower_bound is not None:
            bounded: Tensor = self.safe_gate_lower_bound * self.sigmoid(decay_rate * g)
            return bounded
        return -decay_rate * torch.where(g > 20.0, g, torch.log(1.0 + torch.exp(g)))


class Glm5NextTextLinearAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, size = config.hidden_size, linear_size(config)
        self.num_heads, self.head_dim = config.linear_num_heads, config.linear_head_dim
        self.qkv_proj = MergedLinear(hidden, {"q_proj": size, "k_proj": size, "v_proj": size})
        self.conv1d = CausalConv(3 * size, config.linear_conv_kernel_dim, config.hidden_act, dtype=torch.float32)
        self.forget_gate = Glm5NextTextForgetGate(config)
        self.b_proj = Linear(hidden, self.num_heads)
        self.sigmoid = Activation("sigmoid")
        self.delta_rule = GatedDeltaRule(self.num_heads, self.num_heads, self.head_dim, self.head_dim)
        self.g_a_proj = Linear(hidden, self.head_dim)
        self.g_b_proj = Linear(self.head_dim, size)
        self.o_norm = GatedRMSNorm(self.head_dim, config.rms_norm_eps, "sigmoid", wide=True)
        self.o_proj = Linear(size, hidden)

    def forward(self, hidden: Tensor, batch: ForwardBatch, state: Mapping[str, StateView]) -> Tensor:
        by_head = (-1, self.num_heads, self.head_dim)  # [tokens, heads, dim]
        mixed_qkv = self.conv1d(torch.cat(self.qkv_proj(hidden), dim=-1), batch, state["conv"])
        q, k, v = (part.view(by_head) for part in mixed_qkv.chunk(3, dim=-1))
        g = self.forget_gate(hidden)
        beta = self.sigmoid(self.b_proj(hidden))
        core_attn_out = self.delta_rule(q, k, v, g, beta, batch, state["state"])
        gate = self.g_b_proj(self.g_a_proj(hidden)).view(by_head)
        output: Tensor = self.o_proj(self.o_norm(core_attn_out, gate).flatten(1))
        return output


class Glm5NextTextAttention(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        hidden, rank, q_rank, bias = config.hidden_size, config.kv_lora_rank, config.q_lora_rank, config.attention_bias
        heads, nope, value = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
        self.num_heads, self.head_dim = heads, nope
        self.q_a_proj = Linear(hidden, q_rank, bias=bias)
        self.q_a_layernorm = RMSNorm(q_rank, config.rms_norm_eps)
        self.q_b_proj = Linear(q_rank, heads * nope)
        self.kv_a_proj_with_mqa = Linear(hidden, rank, bias=bias)
        self.kv_a_layernorm = RMSNorm(rank, config.rms_norm_eps)
        self.kv_b_proj = LatentUp(rank, heads, nope, value)
        self.o_proj = Linear(heads * value, hidden, bias=bias)
        self.attn = LatentAttention(heads, rank, nope, 0, value, scale=nope**-0.5)
        self.indexer = None if skips_topk(config, layer) else self.make_indexer(config)

    @staticmethod
    def make_indexer(config: Any) -> PooledIndexer:
        return PooledIndexer(
            config.hidden_size,
            config.q_lora_rank,
            config.index_n_heads,
            config.index_head_dim,
            config.index_topk,
            pool=config.index_kpool,
        )

    def forward(
        self,
        hidden: Tensor,
        batch: ForwardBatch,
        state: Mapping[str, StateView],
        prev_topk_indices: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        q_resid = self.q_a_layernorm(self.q_a_proj(hidden))
        q = self.q_b_proj(q_resid).view(-1, self.num_heads, self.head_dim)  # [tokens, heads, dim]
        k_pass = self.kv_a_layernorm(self.kv_a_proj_with_mqa(hidden))
        if self.indexer is None:
            assert prev_topk_indices is not None  # `accepts` has seen that a layer before it selects
            topk_indices = prev_topk_indices
        else:
            topk_indices = self.indexer(hidden, q_resid, batch, state["index"], state["pools"])
        attended = self.attn(q, None, k_pass, None, self.kv_b_proj, batch, state["latent"], topk_indices)
        return self.o_proj(attended), topk_indices


class Glm5NextTextMoE(Glm4MoeMoE):
    """The routed experts are SwiGLU whatever the config's activation."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, activation="silu", limit=config.swiglu_limit)


class Glm5NextTextDecoderLayer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.block_type = config.layer_types[layer]
        hidden = config.hidden_size
        self.self_attn: nn.Module = (
            Glm5NextTextLinearAttention(config) if self.block_type == LINEAR else Glm5NextTextAttention(config, layer)
        )
        self.mlp: nn.Module = (
            Glm5NextTextMoE(config)
            if config.mlp_layer_types[layer] == "sparse"
            else GatedMLP(hidden, config.intermediate_size, config.hidden_act, limit=config.swiglu_limit)
        )
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.attn_hc = self.hyper_connection(config)
        self.ffn_hc = self.hyper_connection(config)

    @staticmethod
    def hyper_connection(config: Any) -> HyperConnection:
        return HyperConnection(
            config.hidden_size,
            config.hc_mult,
            iterations=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
            fn_dtype=None,
        )

    def forward(
        self,
        streams: Tensor,
        batch: ForwardBatch,
        state: Mapping[str, StateView],
        prev_topk_indices: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """streams [tokens, hc_mult, hidden] to their successors, and what the layer selected: None if it is linear."""
        post, comb, hidden = self.attn_hc(streams)
        hidden = self.input_layernorm(hidden)
        topk_indices = None
        if self.block_type == LINEAR:
            hidden = self.self_attn(hidden, batch, state)
        else:
            hidden, topk_indices = self.self_attn(hidden, batch, state, prev_topk_indices)
        streams = self.attn_hc.expand(post, comb, hidden, streams)
        post, comb, hidden = self.ffn_hc(streams)
        hidden = self.mlp(self.post_attention_layernorm(hidden))
        return self.ffn_hc.expand(post, comb, hidden, streams), topk_indices


class Glm5NextTextHyperHead(nn.Module):
    def forward(self, streams: Tensor) -> Tensor:
        """The mean over [tokens, hc_mult, hidden], summed in order: torch's own order depends on the batch."""
        first, *others = streams.float().unbind(1)
        return (sum(others, start=first) / streams.shape[1]).to(streams.dtype)


class Glm5NextTextModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.hc_mult = config.hc_mult
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Glm5NextTextDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hc_head = Glm5NextTextHyperHead()

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden = self.embed_tokens(batch.input_ids)  # [tokens, hidden]
        streams = hidden.unsqueeze(1).expand(-1, self.hc_mult, -1).contiguous()  # [tokens, hc_mult, hidden]
        topk_indices = None  # [tokens, 1, k], of the last layer with an indexer
        for layer, layer_state in zip(self.layers, state, strict=True):
            streams, selected = layer(streams, batch, layer_state, topk_indices)
            topk_indices = topk_indices if selected is None else selected
        output: Tensor = self.norm(self.hc_head(streams))
        return output


class Glm5NextForConditionalGeneration(GlmForCausalLM):
    model_class = Glm5NextTextModel

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(text_config(config), build)


def accepts(config: Any) -> Support:
    text = text_config(config)
    return Support.unless(reason_against(text), routing_reason(text))
