"""Qwen4-Exp (`Qwen4ExpForCausalLM`, and the language model of `Qwen4ExpForConditionalGeneration`).

Reads beside transformers' modeling_qwen4_exp.py: gated delta nets and attention to blocks that an indexer selects,
over several residual streams with gated mixing, and n-gram embeddings on some layers (`qwen4_exp_ple`). Norms multiply
by 1 + w. Images are not computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rtp_kernel.batch import Build, ForwardBatch, ModelState, StateView
from rtp_kernel.components import (
    Activation,
    Attention,
    BlockMeans,
    Embedding,
    EntryIndexer,
    Gate,
    GatedRMSNorm,
    Linear,
    RMSNorm,
    Rotary,
    RotaryEmbedding,
)
from rtp_kernel.registry import Support
from rtp_runtime.model import text_config
from rtp_runtime.state import CompressedState, PagedState, StateDescriptor, StateDescriptors
from rtp_runtime.weights import Axis, Descriptor, FromCheckpoint, Layout, Tie, Weight, WeightDescriptors

from .qwen2 import LAYER
from .qwen2_moe import Qwen2MoeSparseMoeBlock, fused_expert_weights, hub_expert_weights, shared_expert_weights
from .qwen3_5 import VISION, Qwen3_5GatedDeltaNet, Qwen3_5TextModel, also_nested, flat_in_projections
from .qwen3_next import (
    LINEAR,
    MTP,
    PositionEmbeddings,
    Qwen3NextAttention,
    Qwen3NextRMSNorm,
    delta_net_weights,
    full_attention_weights,
    layer_states,
    layers_of,
    rotary_dim,
)
from .qwen4_exp_ple import Qwen4ExpTextPLELayer, ple_states, ple_weights

INDEXED = ("indexed_attention", "qwen_sparse_attention")
"""A layer type's name, and the one that transformers 5.17 had for it."""
INDEXER = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")


class Qwen4ExpTextGatedDeltaNet(Qwen3_5GatedDeltaNet):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = GatedRMSNorm(self.head_v_dim, config.rms_norm_eps, config.output_gate_type or config.hidden_act)


class Qwen4ExpTextQSAIndexer(nn.Module):
    """Which blocks of `indexer_compress_ratio` tokens each query attends to: the best complete ones, and its own."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.index_head_dim, self.compress_ratio = config.indexer_head_dim, config.indexer_compress_ratio
        heads, dim = config.indexer_n_heads, config.indexer_head_dim
        self.sizes = [heads * dim, config.indexer_kv_heads * dim]
        self.index_qk_proj = Linear(config.hidden_size, sum(self.sizes))
        self.q_layernorm = Qwen3NextRMSNorm(dim, config.rms_norm_eps)
        self.k_layernorm = Qwen3NextRMSNorm(dim, config.rms_norm_eps)
        self.rotary = Rotary("half")
        self.rotary_emb = RotaryEmbedding(rotary_dim(config), Qwen3_5TextModel.rope(config))
        self.blocks = BlockMeans(dim, self.compress_ratio)
        self.choose = EntryIndexer(heads, dim, config.indexer_budget // self.compress_ratio)

    def forward(
        self,
        hidden: Tensor,
        position_embeddings: PositionEmbeddings,
        batch: ForwardBatch,
        state: Mapping[str, StateView],
    ) -> Tensor:
        q, keys = self.index_qk_proj(hidden).split(self.sizes, dim=-1)
        q = self.q_layernorm(q.unflatten(-1, (-1, self.index_head_dim)))  # [tokens, index heads, dim]
        q = self.rotary.one(q, *position_embeddings)
        closed = self.blocks(keys, batch, state["index"], state["position"])
        pooled = self.k_layernorm(closed.means)[:, None]  # [blocks, 1, dim]
        pooled = self.rotary.one(pooled, *self.rotary_emb(closed.positions))  # as the block's first token
        self.blocks.store(pooled[:, 0], closed, batch, state["block"])
        best = self.choose(q, None, batch, state["block"])  # [tokens, 1, blocks]
        seen = batch.index + 1
        own = torch.where(seen % self.compress_ratio > 0, seen // self.compress_ratio, -1)  # an incomplete block
        return torch.cat((best, own[:, None, None]), dim=-1)


class Qwen4ExpTextAttention(Qwen3NextAttention):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.attn = Attention(heads, kv_heads, self.head_dim, selects=config.indexer_compress_ratio)
        self.indexer = Qwen4ExpTextQSAIndexer(config)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        position_embeddings: PositionEmbeddings,
        batch: ForwardBatch,
        state: Mapping[str, StateView],
    ) -> Tensor:
        selection = self.indexer(hidden, position_embeddings, batch, state)
        q, k, v = self.qkv_proj(hidden)
        q, gate = q.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)  # per head: its query, then its gate
        k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (k, v))  # [tokens, kv heads, dim]
        q, k = self.rotary(self.q_norm(q), self.k_norm(k), *position_embeddings)
        attended = self.output_gate(gate.flatten(1), self.attn(q, k, v, batch, state["kv"], selection))
        output: Tensor = self.o_proj(attended)
        return output


class Qwen4ExpTextSparseMoeBlock(Qwen2MoeSparseMoeBlock):
    """Qwen2-MoE's: routed experts, and a shared one behind a sigmoid gate."""


class Qwen4ExpTextGatedResidual(nn.Module):
    """The input of a block, mixed from the residual streams, and the weights with which its output goes back."""

    def __init__(self, config: Any, *, use_combine: bool = True) -> None:
        super().__init__()
        hidden, streams = config.hidden_size, config.hc_count
        self.hidden_size, self.hc_count = hidden, streams
        self.hc_norm = RMSNorm(hidden, config.rms_norm_eps, 1.0, groups=streams)
        self.input_mix_weight_down = Linear(streams * hidden, config.hc_lowrank)
        self.input_mix_weight_up = Linear(config.hc_lowrank, streams * hidden)
        self.block_inject_weight = Linear(streams * hidden, streams) if use_combine else None
        self.silu, self.sigmoid, self.mix = Activation("silu"), Activation("sigmoid"), Gate("sigmoid")

    def forward(self, hyper_input: Tensor) -> Any:
        """[tokens, streams * hidden] -> [tokens, hidden]; to combine, the input and weights [tokens, streams] too."""
        normed = self.hc_norm(hyper_input)
        low = self.silu(self.input_mix_weight_down(normed) / self.hc_count)
        mixed = self.mix(self.input_mix_weight_up(low), normed)
        mixed_input = mixed.unflatten(-1, (self.hc_count, self.hidden_size)).mean(dim=-2)
        if self.block_inject_weight is None:
            return mixed_input
        return mixed_input, hyper_input, 2 * self.sigmoid(self.block_inject_weight(normed) / self.hc_count)


def inject(hyper_input: Tensor, output: Tensor, weights: Tensor) -> Tensor:
    """A block's output [tokens, hidden] added to each stream with its weight."""
    return hyper_input + (output.unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2)


class Qwen4ExpTextDecoderLayer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer_type = config.layer_types[layer]
        if self.layer_type == LINEAR:
            self.linear_attn = Qwen4ExpTextGatedDeltaNet(config)
        else:
            self.self_attn = Qwen4ExpTextAttention(config)
        self.mlp = Qwen4ExpTextSparseMoeBlock(config)
        ids = list(config.ple_layer_ids)
        self.ple = Qwen4ExpTextPLELayer(config, ids.index(layer + 1)) if layer + 1 in ids else None
        self.attn_hyper_connection = Qwen4ExpTextGatedResidual(config)
        self.mlp_hyper_connection = Qwen4ExpTextGatedResidual(config)

    def forward(
        self,
        hidden: Tensor,
        position_embeddings: PositionEmbeddings,
        batch: ForwardBatch,
        state: Mapping[str, StateView],
    ) -> Tensor:
        """hidden [tokens, streams * hidden] -> the same."""
        if self.ple is not None:
            hidden = hidden + self.ple(hidden, batch, state)
        mixed, hyper_input, weights = self.attn_hyper_connection(hidden)
        if self.layer_type == LINEAR:
            output = self.linear_attn(mixed, batch, state)
        else:
            output = self.self_attn(mixed, position_embeddings, batch, state)
        mixed, hyper_input, weights = self.mlp_hyper_connection(inject(hyper_input, output, weights))
        return inject(hyper_input, self.mlp(mixed), weights)


class Qwen4ExpTextModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.hc_count = config.hc_count
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Qwen4ExpTextDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.rotary_emb = RotaryEmbedding(rotary_dim(config), Qwen3_5TextModel.rope(config))
        self.hyper_connection_mixer = Qwen4ExpTextGatedResidual(config, use_combine=False)

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden = self.embed_tokens(batch.input_ids).repeat(1, self.hc_count)  # [tokens, streams * hidden]
        position_embeddings = self.rotary_emb(batch.positions)
        for layer, layer_state in zip(self.layers, state, strict=True):
            hidden = layer(hidden, position_embeddings, batch, layer_state)
        output: Tensor = self.hyper_connection_mixer(hidden)
        return output


class Qwen4ExpForCausalLM(nn.Module):
    def __init__(self, config: Any, build: Build) -> None:
        super().__init__()
        text = text_config(config)
        self.model = Qwen4ExpTextModel(text)
        self.lm_head = Linear(text.hidden_size, text.vocab_size)

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden: Tensor = self.model(batch, state)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab]."""
        logits: Tensor = self.lm_head(hidden)
        return logits


class Qwen4ExpForConditionalGeneration(Qwen4ExpForCausalLM):
    """The language model of the vision-language checkpoint."""


def _weight(name: str, dims: tuple[int | Axis, ...], over: Mapping[str, Any]) -> Weight:
    return Weight(parameter=name, source=FromCheckpoint(name, dims), over=over)


def residual_weights(config: Any) -> list[Descriptor]:
    """Every gated residual: two in each layer, and the mixer at the end, which puts nothing back."""
    streams, rank = config.hc_count * config.hidden_size, config.hc_lowrank
    sizes = {
        "hc_norm.weight": (streams,),
        "input_mix_weight_down.weight": (rank, streams),
        "input_mix_weight_up.weight": (streams, rank),
        "block_inject_weight.weight": (config.hc_count, streams),
    }
    layers = {"layer": range(config.num_hidden_layers)}
    places = (LAYER + "attn_hyper_connection.", LAYER + "mlp_hyper_connection.")
    last = "model.hyper_connection_mixer."
    return [
        *(_weight(place + name, dims, layers) for place in places for name, dims in sizes.items()),
        *(_weight(last + name, dims, {}) for name, dims in sizes.items() if not name.startswith("block_inject")),
    ]


def indexer_weights(config: Any) -> list[Descriptor]:
    over = layers_of(config, *INDEXED)
    prefix, dim = LAYER + "self_attn.indexer.", config.indexer_head_dim
    rows = (config.indexer_n_heads + config.indexer_kv_heads) * dim
    return [
        _weight(prefix + "index_qk_proj.weight", (rows, config.hidden_size), over),
        _weight(prefix + "q_layernorm.weight", (dim,), over),
        _weight(prefix + "k_layernorm.weight", (dim,), over),
    ]


def common_weights(config: Any, layers: dict[str, list[int]]) -> list[Descriptor]:
    """All but the experts and the n-gram embeddings."""
    hidden = config.hidden_size
    table = (Axis("vocab", config.vocab_size), hidden)
    tied = config.tie_word_embeddings
    head = Tie("lm_head.weight", "model.embed_tokens.weight") if tied else _weight("lm_head.weight", table, {})
    return [
        _weight("model.embed_tokens.weight", table, {}),
        head,
        *residual_weights(config),
        *full_attention_weights(config, *INDEXED),
        *indexer_weights(config),
        *delta_net_weights(config, flat_in_projections(config)),
        _weight(LAYER + "mlp.gate.weight", (config.num_experts, hidden), layers),
        *shared_expert_weights(config, layers),
        MTP,
        VISION,
    ]


def weight_descriptors(config: Any) -> WeightDescriptors:
    """As on the hub, and as transformers has them in memory; each alone, or in the vision-language checkpoint."""
    text = text_config(config)
    layers = {"layer": list(range(text.num_hidden_layers))}
    common = common_weights(text, layers)
    hub = (*common, *hub_expert_weights(text, layers), *ple_weights(text, sharded=True))
    fused = (*common, *fused_expert_weights(text, layers), *ple_weights(text, sharded=False))
    return also_nested(WeightDescriptors(*hub, others=[Layout("in memory", fused)]))


def state_descriptors(config: Any) -> StateDescriptors:
    text = text_config(config)
    layers: list[Mapping[str, StateDescriptor]] = []
    for layer, kind in enumerate(text.layer_types):
        states: dict[str, StateDescriptor] = dict(layer_states(text, kind))
        if kind in INDEXED:
            dim, ratio = text.indexer_head_dim, text.indexer_compress_ratio
            states["index"] = PagedState(axes={"index": dim})
            states["position"] = PagedState(axes={"axis": 3}, dtype="int64")
            states["block"] = CompressedState(axes={"index": dim}, tokens_per_entry=ratio)
        elif layer + 1 in text.ple_layer_ids:
            states |= ple_states(text)
        layers.append(states)
    return StateDescriptors(layers)


def accepts(config: Any) -> Support:
    """Only layers of the two types that the reference computes, and an indexer where one is needed."""
    text = text_config(config)
    others = sorted(set(text.layer_types) - {LINEAR, *INDEXED})
    indexed = not set(INDEXED).isdisjoint(text.layer_types)
    missing = [name for name in INDEXER if getattr(text, name) is None] if indexed else []
    return Support.unless(
        bool(others) and f"layer_types {', '.join(others)}: only {LINEAR} and {INDEXED[0]} are known",
        bool(missing) and f"{', '.join(missing)} missing: {INDEXED[0]} chooses by them",
    )
