"""MiniMax-M3's language model (`MiniMaxM3SparseForConditionalGeneration`, and `MiniMaxM3VLForCausalLM` on its own).

Reads beside transformers' modeling_minimax_m3_vl.py: attention to the blocks of keys that an indexer chooses, dense and
routed layers with a clamped SwiGLU, zero-centred norms. Images are not computed: what belongs to them is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rtp_kernel.batch import Build, ForwardBatch, ModelState, StateView
from rtp_kernel.components import (
    Attention,
    BlockSelector,
    Embedding,
    Experts,
    GatedMLP,
    Linear,
    MergedLinear,
    RMSNorm,
    Rotary,
    RotaryEmbedding,
    TopKRouter,
)
from rtp_kernel.registry import Support
from rtp_runtime.model import rope_parameters, text_config
from rtp_runtime.state import PagedState, StateDescriptor, StateDescriptors
from rtp_runtime.weights import WeightDescriptors

from .minimax_m2 import rotary_dim
from .minimax_m3_vl_weights import hub, in_memory

Rotation = tuple[Tensor, Tensor]
"""cos and sin of the step's positions, [tokens, rotated dimensions] each."""


def is_sparse(config: Any, layer: int) -> bool:
    """Whether attention in this layer goes to chosen blocks only."""
    return bool(config.layer_types[layer] == "minimax_m3_sparse")


def make_norm(config: Any, dim: int) -> RMSNorm:
    """Every norm multiplies by 1 + w."""
    return RMSNorm(dim, config.rms_norm_eps, offset=1.0)


class MiniMaxM3VLDenseMLP(GatedMLP):
    def __init__(self, config: Any, intermediate: int) -> None:
        limit, alpha = config.swiglu_limit, config.swiglu_alpha
        super().__init__(config.hidden_size, intermediate, "swiglu_oai", limit=limit, alpha=alpha)


class MiniMaxM3VLSparseMoeBlock(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, experts = config.hidden_size, config.num_local_experts
        self.gate = TopKRouter(
            hidden, experts, config.num_experts_per_tok, score="sigmoid", renormalize=True, bias=True, wide=True
        )
        limit, alpha = config.swiglu_limit, config.swiglu_alpha
        self.experts = Experts(experts, hidden, config.intermediate_size, "swiglu_oai", limit=limit, alpha=alpha)
        self.routed_scaling_factor = config.routed_scaling_factor
        self.shared_experts = MiniMaxM3VLDenseMLP(config, config.shared_intermediate_size)

    def forward(self, hidden: Tensor) -> Tensor:
        shared = self.shared_experts(hidden)
        weights, ids = self.gate(hidden)  # [tokens, experts per token]
        output: Tensor = self.experts(hidden, weights, ids) * self.routed_scaling_factor + shared
        return output


class MiniMaxM3VLIndexer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.q_proj = Linear(config.hidden_size, self.num_heads * self.head_dim)
        self.k_proj = Linear(config.hidden_size, self.head_dim)
        self.q_norm = make_norm(config, self.head_dim)
        self.k_norm = make_norm(config, self.head_dim)
        self.rotary = Rotary("half")
        self.selector = BlockSelector(
            self.num_heads,
            self.head_dim,
            size=config.index_block_size,
            top_k=config.index_topk_blocks,
            local=config.index_local_blocks,
        )

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch, index: StateView) -> Tensor:
        """Chosen blocks of each query and kv head, [tokens, heads, blocks]."""
        q = self.q_norm(self.q_proj(hidden).unflatten(-1, (self.num_heads, self.head_dim)))
        k = self.k_norm(self.k_proj(hidden)).unsqueeze(1)
        cos, sin = (table[..., : self.head_dim] for table in rotation)
        q, k = self.rotary(q, k, cos, sin)
        chosen: Tensor = self.selector(q, k.squeeze(1), batch, index)
        return chosen


class MiniMaxM3VLAttention(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        q_size, kv_size = heads * self.head_dim, kv_heads * self.head_dim
        self.qkv_proj = MergedLinear(config.hidden_size, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size})
        self.o_proj = Linear(q_size, config.hidden_size)
        self.q_norm = make_norm(config, self.head_dim)
        self.k_norm = make_norm(config, self.head_dim)
        self.rotary = Rotary("half")
        self.indexer = MiniMaxM3VLIndexer(config) if is_sparse(config, layer) else None
        selects = config.index_block_size if is_sparse(config, layer) else 0
        self.attn = Attention(heads, kv_heads, self.head_dim, selects=selects)

    def forward(
        self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch, state: Mapping[str, StateView]
    ) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj(hidden))  # [tokens, heads, dim]
        q, k = self.rotary(self.q_norm(q), self.k_norm(k), *rotation)
        blocks = None if self.indexer is None else self.indexer(hidden, rotation, batch, state["index"])
        output: Tensor = self.o_proj(self.attn(q, k, v, batch, state["kv"], blocks))
        return output


class MiniMaxM3VLDecoderLayer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        routed = config.mlp_layer_types[layer] == "sparse"
        self.self_attn = MiniMaxM3VLAttention(config, layer)
        self.mlp = (
            MiniMaxM3VLSparseMoeBlock(config) if routed else MiniMaxM3VLDenseMLP(config, config.dense_intermediate_size)
        )
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.post_attention_layernorm = make_norm(config, config.hidden_size)

    def forward(
        self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch, state: Mapping[str, StateView]
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, batch, state)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class MiniMaxM3VLTextModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MiniMaxM3VLDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = make_norm(config, config.hidden_size)
        # The factor alone decides: like the reference, this does not look at the config's rotary_dim.
        self.rotary_emb = RotaryEmbedding(rotary_dim(config), rope_parameters(config))

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden = self.embed_tokens(batch.input_ids)  # [tokens, hidden]
        rotation = self.rotary_emb(batch.positions)
        for layer, views in zip(self.layers, state, strict=True):
            hidden = layer(hidden, rotation, batch, views)
        output: Tensor = self.norm(hidden)
        return output


class MiniMaxM3VLForCausalLM(nn.Module):
    def __init__(self, config: Any, build: Build) -> None:
        super().__init__()
        text = text_config(config)
        self.model = MiniMaxM3VLTextModel(text)
        self.lm_head = Linear(text.hidden_size, text.vocab_size)

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden: Tensor = self.model(batch, state)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab]."""
        logits: Tensor = self.lm_head(hidden)
        return logits


class MiniMaxM3SparseForConditionalGeneration(MiniMaxM3VLForCausalLM):
    """The same from a vision-language checkpoint, for text."""


def accepts(config: Any) -> Support:
    """Declines index heads that the query heads cannot be shared among."""
    text = text_config(config)
    heads, index_heads = text.num_attention_heads, text.index_n_heads
    return Support.unless(
        heads % index_heads != 0 and f"{heads} query heads cannot share the choices of {index_heads} index heads"
    )


def weight_descriptors(config: Any) -> WeightDescriptors:
    text = text_config(config)
    others = [in_memory("transformers, text", text, "model."), in_memory("transformers", text, "model.language_model.")]
    return WeightDescriptors(*hub(text), others=others)


def layer_state(config: Any, layer: int) -> dict[str, StateDescriptor]:
    axes = {"kv": 2, "kv heads": config.num_key_value_heads, "head dim": config.head_dim}
    states: dict[str, StateDescriptor] = {"kv": PagedState(axes=axes, shard="kv heads")}
    if is_sparse(config, layer):
        states["index"] = PagedState(axes={"index": config.index_head_dim})
    return states


def state_descriptors(config: Any) -> StateDescriptors:
    text = text_config(config)
    return StateDescriptors([layer_state(text, layer) for layer in range(text.num_hidden_layers)])
