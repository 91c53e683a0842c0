"""MiniMax-M2, M2.1 and M2.5 (`MiniMaxM2ForCausalLM`); reads beside transformers' modeling_minimax_m2.py.

Full attention with norms over all heads of q and of k at once and a partly rotated head, and a sigmoid router.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rtp_kernel.batch import Build, ForwardBatch, ModelState, StateView
from rtp_kernel.components import (
    Attention,
    Embedding,
    Experts,
    Linear,
    MergedLinear,
    RMSNorm,
    Rotary,
    RotaryEmbedding,
    TopKRouter,
)
from rtp_kernel.registry import Support
from rtp_runtime.model import rope_parameters
from rtp_runtime.state import PagedState, StateDescriptors
from rtp_runtime.weights import Axis, Descriptor, Layout, WeightDescriptors

from .weights import (
    IN_MEMORY,
    LAYER,
    ON_HUB,
    attention_weights,
    extra_layers,
    fused_expert_weights,
    hub_expert_weights,
    outer_weights,
    router_bias,
    tensor,
)

Rotation = tuple[Tensor, Tensor]
"""cos and sin of the step's positions, [tokens, rotated dimensions] each."""


def rotary_dim(config: Any) -> int:
    """Leading dimensions of a head that are rotated; a release's own `rotary_dim` has become the factor."""
    return int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))


class MiniMaxM2Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.qkv_proj = MergedLinear(config.hidden_size, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size})
        self.o_proj = Linear(q_size, config.hidden_size)
        self.q_norm = RMSNorm(q_size, config.rms_norm_eps)  # over all heads at once
        self.k_norm = RMSNorm(kv_size, config.rms_norm_eps)
        self.rotary = Rotary("half")
        self.attn = Attention(config.num_attention_heads, config.num_key_value_heads, self.head_dim)

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch, kv: StateView) -> Tensor:
        q, k, v = self.qkv_proj(hidden)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (self.q_norm(q), self.k_norm(k), v))
        q, k = self.rotary(q, k, *rotation)  # [tokens, heads, dim]
        output: Tensor = self.o_proj(self.attn(q, k, v, batch, kv))
        return output


class MiniMaxM2SparseMoeBlock(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, experts = config.hidden_size, config.num_local_experts
        # The reference holds the router's bias one level up, in the block.
        self.gate = TopKRouter(
            hidden, experts, config.num_experts_per_tok, score="sigmoid", renormalize=True, bias=True, wide=True
        )
        self.experts = Experts(experts, hidden, config.intermediate_size, config.hidden_act)

    def forward(self, hidden: Tensor) -> Tensor:
        weights, ids = self.gate(hidden)  # [tokens, experts per token]
        output: Tensor = self.experts(hidden, weights, ids)
        return output


class MiniMaxM2DecoderLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MiniMaxM2Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MiniMaxM2SparseMoeBlock(config)

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch, kv: StateView) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, batch, kv)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class MiniMaxM2Model(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MiniMaxM2DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(rotary_dim(config), rope_parameters(config))

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden = self.embed_tokens(batch.input_ids)  # [tokens, hidden]
        rotation = self.rotary_emb(batch.positions)
        for layer, views in zip(self.layers, state, strict=True):
            hidden = layer(hidden, rotation, batch, views["kv"])
        output: Tensor = self.norm(hidden)
        return output


class MiniMaxM2ForCausalLM(nn.Module):
    def __init__(self, config: Any, build: Build) -> None:
        super().__init__()
        self.model = MiniMaxM2Model(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden: Tensor = self.model(batch, state)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab]."""
        logits: Tensor = self.lm_head(hidden)
        return logits


def accepts(config: Any) -> Support:
    """Declines switches of released configs that the reference does not look at, where they ask for something else."""
    kinds = getattr(config, "attn_type_list", None) or [1]
    norms = getattr(config, "qk_norm_type", "per_layer")
    score = getattr(config, "scoring_func", "sigmoid")
    return Support.unless(
        any(kind != 1 for kind in kinds) and "attn_type_list asks for other than full attention (1)",
        not getattr(config, "use_qk_norm", True) and "use_qk_norm is off",
        norms != "per_layer" and f'qk_norm_type is "{norms}", not "per_layer": one norm over all heads',
        score != "sigmoid" and f'scoring_func is "{score}", not "sigmoid"',
        not getattr(config, "use_routing_bias", True) and "use_routing_bias is off",
        bool(getattr(config, "shared_intermediate_size", 0)) and "shared_intermediate_size asks for a shared expert",
    )


def weight_descriptors(config: Any) -> WeightDescriptors:
    layers = {"layer": range(config.num_hidden_layers)}
    common: list[Descriptor] = [
        *outer_weights(config),
        *attention_weights(config, config.head_dim, layers),
        tensor(
            LAYER + "self_attn.q_norm.weight", Axis("q heads", config.num_attention_heads, config.head_dim), over=layers
        ),
        tensor(
            LAYER + "self_attn.k_norm.weight",
            Axis("kv heads", config.num_key_value_heads, config.head_dim, replicable=True),
            over=layers,
        ),
        extra_layers(config),
    ]
    bias = "e_score_correction_bias"
    hub = [*hub_expert_weights(config, layers), router_bias(config, ON_HUB + bias, layers)]
    fused = [*fused_expert_weights(config, layers), router_bias(config, IN_MEMORY + bias, layers)]
    return WeightDescriptors(*common, *hub, others=[Layout("fused experts", (*common, *fused))])


def state_descriptors(config: Any) -> StateDescriptors:
    axes = {"kv": 2, "kv heads": config.num_key_value_heads, "head dim": config.head_dim}
    return StateDescriptors([{"kv": PagedState(axes=axes, shard="kv heads")} for _ in range(config.num_hidden_layers)])
