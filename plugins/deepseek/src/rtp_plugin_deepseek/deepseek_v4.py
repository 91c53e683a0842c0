"""DeepSeek-V4 Flash and Pro (`DeepseekV4ForCausalLM`); reads beside transformers' modeling_deepseek_v4.py.

One key, which is the value too, serves all heads. A query attends to the last few tokens and, on most layers, to older
ones compressed: all of a few heavily compressed entries (HCA), or a selection of many (CSA). The residual is a stack of
streams, and every layer routes to experts, the first ones by a table of token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from rtp_kernel.batch import Build, ForwardBatch, ModelState, StateView
from rtp_kernel.components import (
    CompressedAttention,
    Embedding,
    EntryIndexer,
    Experts,
    GatedMLP,
    GroupedLinear,
    HashRouter,
    HyperConnection,
    HyperHead,
    Linear,
    RMSNorm,
    Rotary,
    RotaryEmbedding,
    TopKRouter,
    WindowPool,
    parameter,
)
from rtp_kernel.registry import Support
from rtp_runtime.model import rope_parameters
from rtp_runtime.state import CompressedState, SlotState, StateDescriptor, StateDescriptors, WindowState

from .deepseek_v4_weights import weight_descriptors

__all__ = ["DeepseekV4ForCausalLM", "accepts", "state_descriptors", "weight_descriptors"]

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
SCORES = ("sqrtsoftplus", "softmax", "sigmoid")

Angles = tuple[Tensor, Tensor]
"""cos and sin, [tokens, rotated dim] each."""
PositionEmbeddings = Mapping[str, Angles]
"""The angles of every token, "main" and "compress", and by kind of compressed layer those of the first token of the
window that a token closes."""
LayerState = Mapping[str, StateView]


def norm(config: Any, dim: int) -> RMSNorm:
    """Its weight is float32 whatever the model's dtype, and multiplied in float32."""
    return RMSNorm(dim, config.rms_norm_eps, dtype=torch.float32)


def apply_rotary_pos_emb(rotary: Rotary, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, dim] with its last dimensions turned, as many as cos has, in float32."""
    rope_dim = cos.shape[-1]
    turned = rotary.one(x[..., -rope_dim:].float(), cos.float(), sin.float()).to(x.dtype)
    return torch.cat((x[..., :-rope_dim], turned), dim=-1)


class DeepseekV4RotaryEmbedding(nn.Module):
    """Sliding layers turn by a table of their own, "main"; those with compressed entries by "compress"."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.main = self.table(config, "main")
        self.compress = self.table(config, "compress")

    @staticmethod
    def table(config: Any, layer_type: str) -> RotaryEmbedding:
        share = config.rope_parameters[layer_type].get("partial_rotary_factor", 1.0)
        return RotaryEmbedding(int(config.head_dim * share), rope_parameters(config, layer_type))

    def forward(self, positions: Tensor, layer_type: str) -> Angles:
        angles: Angles = self.main(positions) if layer_type == "main" else self.compress(positions)
        return angles


class DeepseekV4Compressor(nn.Module):
    """Makes entries of windows of tokens, in the state `name`: what HCA, CSA and CSA's indexer share.

    With `overlap`, each token has two vectors, one for the entry of its own window and one for that of the next.
    """

    def __init__(self, config: Any, layer_type: str, name: str, head_dim: int) -> None:
        super().__init__()
        self.layer_type, self.name = layer_type, name
        rate, overlap = config.compress_rates[layer_type], layer_type == CSA
        self.pool = WindowPool(head_dim, rate, overlap=overlap)
        self.kv_proj = Linear(config.hidden_size, self.pool.channels)
        self.gate_proj = Linear(config.hidden_size, self.pool.channels)
        self.position_bias = parameter(rate, self.pool.channels, dtype=torch.float32)
        self.kv_norm = norm(config, head_dim)
        self.rotary = Rotary("interleaved")

    def compress(
        self, hidden: Tensor, position_embeddings: PositionEmbeddings, batch: ForwardBatch, state: LayerState
    ) -> None:
        """Write the entries of the windows that close in this step, and keep the tokens of those still open."""
        buffers = state[self.name + ".kv"], state[self.name + ".gate"]
        entries = self.pool(self.kv_proj(hidden), self.gate_proj(hidden), self.position_bias, batch, *buffers)
        entries = self.kv_norm(entries).unsqueeze(1)  # [tokens, 1, head dim]; only rows that close a window count
        entries = apply_rotary_pos_emb(self.rotary, entries, *position_embeddings[self.layer_type])
        self.pool.store(entries.squeeze(1), state[self.name], batch)


class DeepseekV4HCACompressor(DeepseekV4Compressor):
    def __init__(self, config: Any) -> None:
        super().__init__(config, HCA, "compressor", config.head_dim)

    def forward(
        self,
        hidden: Tensor,
        q_residual: Tensor,
        position_embeddings: PositionEmbeddings,
        batch: ForwardBatch,
        state: LayerState,
    ) -> None:
        self.compress(hidden, position_embeddings, batch, state)


class DeepseekV4IndexerScorer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weights_proj = Linear(config.hidden_size, config.index_n_heads)
        self.select = EntryIndexer(config.index_n_heads, config.index_head_dim, config.index_topk)

    def forward(self, q: Tensor, hidden: Tensor, batch: ForwardBatch, keys: StateView) -> Tensor:
        """The entries worth attending to, [tokens, 1, k]; -1 = none."""
        selection: Tensor = self.select(q, self.weights_proj(hidden), batch, keys)
        return selection


class DeepseekV4Indexer(DeepseekV4Compressor):
    """A smaller compressor, whose entries are the keys by which a query selects among those of the larger one."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, CSA, "indexer", config.index_head_dim)
        self.head_dim = config.index_head_dim
        self.q_b_proj = Linear(config.q_lora_rank, config.index_n_heads * self.head_dim)
        self.scorer = DeepseekV4IndexerScorer(config)

    def forward(
        self,
        hidden: Tensor,
        q_residual: Tensor,
        position_embeddings: PositionEmbeddings,
        batch: ForwardBatch,
        state: LayerState,
    ) -> Tensor:
        self.compress(hidden, position_embeddings, batch, state)
        q = self.q_b_proj(q_residual).unflatten(-1, (-1, self.head_dim))  # [tokens, index heads, index head dim]
        q = apply_rotary_pos_emb(self.rotary, q, *position_embeddings["compress"])
        selection: Tensor = self.scorer(q, hidden, batch, state[self.name])
        return selection


class DeepseekV4CSACompressor(DeepseekV4Compressor):
    def __init__(self, config: Any) -> None:
        super().__init__(config, CSA, "compressor", config.head_dim)
        self.indexer = DeepseekV4Indexer(config)

    def forward(
        self,
        hidden: Tensor,
        q_residual: Tensor,
        position_embeddings: PositionEmbeddings,
        batch: ForwardBatch,
        state: LayerState,
    ) -> Tensor:
        self.compress(hidden, position_embeddings, batch, state)
        selection: Tensor = self.indexer(hidden, q_residual, position_embeddings, batch, state)
        return selection


COMPRESSOR_CLASSES: Mapping[str, type[nn.Module]] = MappingProxyType(
    {CSA: DeepseekV4CSACompressor, HCA: DeepseekV4HCACompressor}
)


class DeepseekV4Attention(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        layer_type = config.layer_types[layer]
        hidden, heads, self.head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.rope_layer_type = "main" if layer_type == SLIDING else "compress"
        self.q_a_proj = Linear(hidden, config.q_lora_rank)
        self.q_a_norm = norm(config, config.q_lora_rank)
        self.q_b_proj = Linear(config.q_lora_rank, heads * self.head_dim)
        self.q_b_norm = RMSNorm(self.head_dim, config.rms_norm_eps, weight=False)
        self.kv_proj = Linear(hidden, self.head_dim)
        self.kv_norm = norm(config, self.head_dim)
        self.o_groups = config.o_groups
        self.o_a_proj = GroupedLinear(
            heads * self.head_dim // self.o_groups, self.o_groups * config.o_lora_rank, self.o_groups
        )
        self.o_b_proj = Linear(self.o_groups * config.o_lora_rank, hidden)
        self.sinks = parameter(heads, dtype=torch.float32)
        self.rotary = Rotary("interleaved")
        self.attn = CompressedAttention(heads, self.head_dim, window=config.sliding_window)
        self.compressor = None if layer_type == SLIDING else COMPRESSOR_CLASSES[layer_type](config)

    def forward(
        self, hidden: Tensor, position_embeddings: PositionEmbeddings, batch: ForwardBatch, state: LayerState
    ) -> Tensor:
        cos, sin = position_embeddings[self.rope_layer_type]
        q_residual = self.q_a_norm(self.q_a_proj(hidden))
        q = self.q_b_norm(self.q_b_proj(q_residual).unflatten(-1, (-1, self.head_dim)))  # [tokens, heads, head dim]
        q = apply_rotary_pos_emb(self.rotary, q, cos, sin)
        kv = self.kv_norm(self.kv_proj(hidden)).unsqueeze(1)  # [tokens, 1, head dim]
        kv = apply_rotary_pos_emb(self.rotary, kv, cos, sin).squeeze(1)
        selection = None
        if self.compressor is not None:
            selection = self.compressor(hidden, q_residual, position_embeddings, batch, state)
        output = self.attn(q, kv, self.sinks, batch, state["kv"], state.get("compressor"), selection)
        # Values are keys, and so are turned; turning back leaves each as far off as its token is from the query.
        output = apply_rotary_pos_emb(self.rotary, output.unflatten(-1, (-1, self.head_dim)), cos, -sin)
        grouped = output.flatten(1).view(-1, self.o_groups, self.o_a_proj.in_features)
        projected: Tensor = self.o_b_proj(self.o_a_proj(grouped).flatten(1))
        return projected


def make_router(config: Any, *, hashed: bool) -> nn.Module:
    """The reference renormalises, whatever `norm_topk_prob` says."""
    sizes = config.hidden_size, config.n_routed_experts, config.num_experts_per_tok
    options = {
        "score": config.scoring_func,
        "renormalize": True,
        "renormalize_eps": 1e-20,
        "scale": config.routed_scaling_factor,
    }
    return HashRouter(*sizes, config.vocab_size, **options) if hashed else TopKRouter(*sizes, bias=True, **options)


class DeepseekV4SparseMoeBlock(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.moe_intermediate_size
        activation, limit = config.hidden_act, config.swiglu_limit
        self.is_hash = config.mlp_layer_types[layer] == "hash_moe"
        self.gate = make_router(config, hashed=self.is_hash)
        self.experts = Experts(config.n_routed_experts, hidden, intermediate, activation, limit)
        self.shared_experts = GatedMLP(hidden, intermediate, activation, bias=config.mlp_bias, limit=limit)

    def forward(self, hidden: Tensor, input_ids: Tensor) -> Tensor:
        weights, ids = self.gate(hidden, input_ids) if self.is_hash else self.gate(hidden)
        output: Tensor = self.experts(hidden, weights, ids) + self.shared_experts(hidden)
        return output


class DeepseekV4DecoderLayer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.self_attn = DeepseekV4Attention(config, layer)
        self.mlp = DeepseekV4SparseMoeBlock(config, layer)
        self.input_layernorm = norm(config, config.hidden_size)
        self.post_attention_layernorm = norm(config, config.hidden_size)
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
        )

    def forward(
        self, streams: Tensor, position_embeddings: PositionEmbeddings, batch: ForwardBatch, state: LayerState
    ) -> Tensor:
        """streams [tokens, hc_mult, hidden], before and after."""
        post, comb, hidden = self.attn_hc(streams)
        hidden = self.self_attn(self.input_layernorm(hidden), position_embeddings, batch, state)
        streams = self.attn_hc.expand(post, comb, hidden, streams)
        post, comb, hidden = self.ffn_hc(streams)
        hidden = self.mlp(self.post_attention_layernorm(hidden), batch.input_ids)
        return self.ffn_hc.expand(post, comb, hidden, streams)


class DeepseekV4Model(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.hc_mult = config.hc_mult
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DeepseekV4DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = norm(config, config.hidden_size)
        self.rotary_emb = DeepseekV4RotaryEmbedding(config)
        self.rates = {kind: config.compress_rates[kind] for kind in (CSA, HCA) if kind in config.layer_types}
        self.hc_head = HyperHead(config.hidden_size, config.hc_mult, eps=config.hc_eps, norm_eps=config.rms_norm_eps)

    def position_embeddings(self, batch: ForwardBatch) -> PositionEmbeddings:
        """An entry stands where its window begins: `rate` - 1 tokens before the one that closes it."""
        tables = {layer_type: self.rotary_emb(batch.positions, layer_type) for layer_type in ("main", "compress")}
        starts = {kind: self.rotary_emb.compress(batch.index - (rate - 1)) for kind, rate in self.rates.items()}
        return tables | starts

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden = self.embed_tokens(batch.input_ids)  # [tokens, hidden]
        streams = hidden.unsqueeze(1).expand(-1, self.hc_mult, -1).contiguous()
        position_embeddings = self.position_embeddings(batch)
        for layer, layer_state in zip(self.layers, state, strict=True):
            streams = layer(streams, position_embeddings, batch, layer_state)
        output: Tensor = self.norm(self.hc_head(streams))
        return output


class DeepseekV4ForCausalLM(nn.Module):
    def __init__(self, config: Any, build: Build) -> None:
        super().__init__()
        self.model = DeepseekV4Model(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden: Tensor = self.model(batch, state)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab]."""
        logits: Tensor = self.lm_head(hidden)
        return logits


def accepts(config: Any) -> Support:
    score, split = config.scoring_func, config.num_attention_heads * config.head_dim % config.o_groups
    return Support.unless(
        score not in SCORES and f'scoring_func is "{score}"; the router knows {", ".join(SCORES)}',
        split != 0 and f"o_groups is {config.o_groups}, which does not divide num_attention_heads * head_dim",
    )


def compressor_states(config: Any, layer_type: str, name: str, head_dim: int) -> dict[str, StateDescriptor]:
    """Entries, and the buffers that hold the tokens of the open window; of CSA, those of the window before it too."""
    pool = WindowPool(head_dim, config.compress_rates[layer_type], overlap=layer_type == CSA)
    buffer = {"tokens": pool.places, "channels": pool.channels}
    return {
        name: CompressedState(axes={"head dim": head_dim}, tokens_per_entry=pool.ratio),
        name + ".kv": SlotState(axes=buffer),
        name + ".gate": SlotState(axes=buffer, initial=float("-inf")),
    }


def layer_states(config: Any, layer_type: str) -> dict[str, StateDescriptor]:
    states: dict[str, StateDescriptor] = {
        "kv": WindowState(axes={"head dim": config.head_dim}, window=config.sliding_window)
    }
    if layer_type != SLIDING:
        states |= compressor_states(config, layer_type, "compressor", config.head_dim)
    if layer_type == CSA:
        states |= compressor_states(config, layer_type, "indexer", config.index_head_dim)
    return states


def state_descriptors(config: Any) -> StateDescriptors:
    return StateDescriptors([layer_states(config, layer_type) for layer_type in config.layer_types])
