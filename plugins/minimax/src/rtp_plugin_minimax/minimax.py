"""MiniMax-Text-01 and M1 (`MiniMaxForCausalLM`); reads beside transformers' modeling_minimax.py.

Most layers hold lightning attention, every eighth full attention; the residual is the normed input, scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rtp_kernel.batch import Build, ForwardBatch, ModelState, StateView
from rtp_kernel.components import (
    Activation,
    Attention,
    Embedding,
    Experts,
    Gate,
    LightningAttention,
    Linear,
    MergedLinear,
    RMSNorm,
    Rotary,
    RotaryEmbedding,
    TopKRouter,
)
from rtp_runtime.model import rope_parameters
from rtp_runtime.state import PagedState, SlotState, StateDescriptor, StateDescriptors, WindowState
from rtp_runtime.weights import Axis, Descriptor, Layout, Skip, WeightDescriptors

from .weights import (
    LAYER,
    attention_weights,
    extra_layers,
    fused_expert_weights,
    hub_expert_weights,
    outer_weights,
    tensor,
)

Rotation = tuple[Tensor, Tensor]
"""cos and sin of the step's positions, [tokens, head dim] each."""


def head_dim(config: Any) -> int:
    """MiniMaxConfig leaves it empty; a checkpoint's own value wins."""
    declared: int | None = config.head_dim
    return declared or config.hidden_size // config.num_attention_heads


def is_linear(config: Any, layer: int) -> bool:
    """Whether the layer holds lightning attention. Older files say so in `attn_type_list`: 0 = linear, 1 = full."""
    older = getattr(config, "attn_type_list", None)
    if older is not None and "layer_types" not in getattr(config, "raw", {}):
        return bool(older[layer] == 0)
    return bool(config.layer_types[layer] == "linear_attention")


class MiniMaxLightningAttention(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_attention_heads, head_dim(config)
        size = self.num_heads * self.head_dim
        self.act_fn = Activation(config.hidden_act)
        self.norm = RMSNorm(size, 1e-6)
        self.qkv_proj = Linear(config.hidden_size, 3 * size)
        self.out_proj = Linear(size, config.hidden_size)
        self.output_gate = Linear(config.hidden_size, size)
        self.attn = LightningAttention(
            self.num_heads, self.head_dim, layer, config.num_hidden_layers, chunk=config.block_size
        )
        self.gated = Gate("sigmoid")

    def forward(
        self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch, state: Mapping[str, StateView]
    ) -> Tensor:
        qkv = self.act_fn(self.qkv_proj(hidden)).unflatten(-1, (self.num_heads, 3 * self.head_dim))
        q, k, v = qkv.split(self.head_dim, dim=-1)  # [tokens, heads, dim]
        attended = self.norm(self.attn(q, k, v, batch, state["state"]))
        output: Tensor = self.out_proj(self.gated(self.output_gate(hidden), attended))
        return output


class MiniMaxAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = head_dim(config)
        q_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.qkv_proj = MergedLinear(config.hidden_size, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size})
        self.o_proj = Linear(q_size, config.hidden_size)
        self.rotary = Rotary("half")
        self.attn = Attention(
            config.num_attention_heads, config.num_key_value_heads, self.head_dim, window=config.sliding_window
        )

    def forward(
        self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch, state: Mapping[str, StateView]
    ) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj(hidden))  # [tokens, heads, dim]
        q, k = self.rotary(q, k, *rotation)
        output: Tensor = self.o_proj(self.attn(q, k, v, batch, state["kv"]))
        return output


class MiniMaxSparseMoeBlock(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, experts = config.hidden_size, config.num_local_experts
        self.gate = TopKRouter(
            hidden, experts, config.num_experts_per_tok, score="softmax", renormalize=True, wide=True
        )
        self.experts = Experts(experts, hidden, config.intermediate_size, config.hidden_act)

    def forward(self, hidden: Tensor) -> Tensor:
        weights, ids = self.gate(hidden)  # [tokens, experts per token]
        output: Tensor = self.experts(hidden, weights, ids)
        return output


class MiniMaxDecoderLayer(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        linear = is_linear(config, layer)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MiniMaxLightningAttention(config, layer) if linear else MiniMaxAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MiniMaxSparseMoeBlock(config)
        self.attn_alpha_factor = config.linear_attn_alpha_factor if linear else config.full_attn_alpha_factor
        self.attn_beta_factor = config.linear_attn_beta_factor if linear else config.full_attn_beta_factor
        self.mlp_alpha_factor, self.mlp_beta_factor = config.mlp_alpha_factor, config.mlp_beta_factor

    def forward(
        self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch, state: Mapping[str, StateView]
    ) -> Tensor:
        residual = self.input_layernorm(hidden)  # what is carried on is normed
        attended = self.self_attn(residual, rotation, batch, state)
        residual = self.post_attention_layernorm(residual * self.attn_alpha_factor + attended * self.attn_beta_factor)
        output: Tensor = residual * self.mlp_alpha_factor + self.mlp(residual) * self.mlp_beta_factor
        return output


class MiniMaxModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MiniMaxDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Whole heads: like the reference, this does not look at the rotary_dim of released configs.
        self.rotary_emb = RotaryEmbedding(head_dim(config), rope_parameters(config))

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden = self.embed_tokens(batch.input_ids)  # [tokens, hidden]
        rotation = self.rotary_emb(batch.positions)
        for layer, views in zip(self.layers, state, strict=True):
            hidden = layer(hidden, rotation, batch, views)
        output: Tensor = self.norm(hidden)
        return output


class MiniMaxForCausalLM(nn.Module):
    def __init__(self, config: Any, build: Build) -> None:
        super().__init__()
        self.model = MiniMaxModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden: Tensor = self.model(batch, state)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] to [rows, vocab]."""
        logits: Tensor = self.lm_head(hidden)
        return logits


def lightning_weights(config: Any, layers: Mapping[str, list[int]]) -> list[Descriptor]:
    """Rows of `qkv_proj` are those of q, k and v of one head after the other."""
    prefix, hidden = LAYER + "self_attn.", config.hidden_size
    heads = Axis("q heads", config.num_attention_heads, head_dim(config))
    rows = Axis("q heads", config.num_attention_heads, 3 * head_dim(config))
    decays = "slope_rate|query_decay|key_decay|diagonal_decay"
    return [
        tensor(prefix + "qkv_proj.weight", rows, hidden, over=layers),
        tensor(prefix + "output_gate.weight", heads, hidden, over=layers),
        tensor(prefix + "norm.weight", heads, over=layers),
        tensor(prefix + "out_proj.weight", hidden, heads, over=layers),
        Skip(
            rf"model\.layers\.\d+\.self_attn\.(?:{decays})",
            "decay tables: they follow from head and layer, and are made in float32 whatever the file's dtype",
        ),
    ]


def weight_descriptors(config: Any) -> WeightDescriptors:
    layers = range(config.num_hidden_layers)
    linear = {"layer": [layer for layer in layers if is_linear(config, layer)]}
    full = {"layer": [layer for layer in layers if not is_linear(config, layer)]}
    common = [
        *outer_weights(config),
        *attention_weights(config, head_dim(config), full),
        *lightning_weights(config, linear),
        extra_layers(config),
    ]
    fused = Layout("fused experts", (*common, *fused_expert_weights(config, {"layer": layers})))
    return WeightDescriptors(*common, *hub_expert_weights(config, {"layer": layers}), others=[fused])


def layer_state(config: Any, layer: int) -> dict[str, StateDescriptor]:
    heads, dim = config.num_attention_heads, head_dim(config)
    if is_linear(config, layer):
        return {"state": SlotState(axes={"heads": heads, "key": dim, "value": dim}, shard="heads", dtype="float32")}
    axes = {"kv": 2, "kv heads": config.num_key_value_heads, "head dim": dim}
    if config.sliding_window is not None:
        return {"kv": WindowState(axes=axes, shard="kv heads", window=config.sliding_window)}
    return {"kv": PagedState(axes=axes, shard="kv heads")}


def state_descriptors(config: Any) -> StateDescriptors:
    return StateDescriptors([layer_state(config, layer) for layer in range(config.num_hidden_layers)])
