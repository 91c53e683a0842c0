"""Qwen3-Next (`Qwen3NextForCausalLM`); reads beside transformers' modeling_qwen3_next.py.

Gated delta nets with a gated full attention between, over Qwen2-MoE's sparse blocks. Norms multiply by 1 + w.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rtp_kernel.batch import Build, ForwardBatch, ModelState, StateView
from rtp_kernel.components import (
    Attention,
    CausalConv,
    DeltaGates,
    Embedding,
    Gate,
    GatedDeltaRule,
    GatedMLP,
    GatedRMSNorm,
    Linear,
    MergedLinear,
    RMSNorm,
    RopeParameters,
    Rotary,
    RotaryEmbedding,
    parameter,
)
from rtp_kernel.registry import Support
from rtp_runtime.model import rope_parameters
from rtp_runtime.state import PagedState, SlotState, StateDescriptors
from rtp_runtime.weights import (
    Axis,
    Concat,
    Descriptor,
    FromCheckpoint,
    Skip,
    Source,
    Weight,
    WeightDescriptors,
)

from .qwen2 import LAYER, outer_weights
from .qwen2_moe import (
    Qwen2MoeSparseMoeBlock,
    dense_mlp_weights,
    is_sparse,
    moe_weight_descriptors,
    shared_expert_weights,
    sparse_layers,
)

PositionEmbeddings = tuple[Tensor, Tensor]
"""cos and sin of the step's positions, [tokens, turned part of the head dim] each."""
LINEAR, FULL = "linear_attention", "full_attention"
Qwen3NextRMSNorm = partial(RMSNorm, offset=1.0)


def rotary_dim(config: Any) -> int:
    """How much of each head is turned: its leading part."""
    return int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))


class Qwen3NextAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.qkv_proj = MergedLinear(
            config.hidden_size, {"q_proj": q_size * 2, "k_proj": kv_size, "v_proj": kv_size}, bias=config.attention_bias
        )
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3NextRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = Qwen3NextRMSNorm(self.head_dim, config.rms_norm_eps)
        self.rotary = Rotary("half")
        self.attn = Attention(config.num_attention_heads, config.num_key_value_heads, self.head_dim)
        self.output_gate = Gate("sigmoid")

    def forward(
        self, hidden: Tensor, position_embeddings: PositionEmbeddings, batch: ForwardBatch, kv: StateView
    ) -> Tensor:
        q, k, v = self.qkv_proj(hidden)
        q, gate = q.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)  # per head: its query, then its gate
        k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (k, v))  # [tokens, kv heads, dim]
        q, k = self.rotary(self.q_norm(q), self.k_norm(k), *position_embeddings)
        attended = self.output_gate(gate.flatten(1), self.attn(q, k, v, batch, kv))
        output: Tensor = self.o_proj(attended)
        return output


class Qwen3NextGatedDeltaNet(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_k_heads, self.num_v_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.head_k_dim, self.head_v_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.key_dim = self.head_k_dim * self.num_k_heads
        self.value_dim = self.head_v_dim * self.num_v_heads
        self.conv1d = CausalConv(2 * self.key_dim + self.value_dim, config.linear_conv_kernel_dim, config.hidden_act)
        self.make_in_projections(config)
        self.dt_bias = parameter(self.num_v_heads)
        self.A_log = parameter(self.num_v_heads)
        self.gates = DeltaGates(self.num_v_heads)
        self.delta_rule = GatedDeltaRule(self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim)
        self.norm = GatedRMSNorm(self.head_v_dim, config.rms_norm_eps)
        self.out_proj = Linear(self.value_dim, config.hidden_size)

    def make_in_projections(self, config: Any) -> None:
        self.in_proj_qkvz = Linear(config.hidden_size, 2 * self.key_dim + 2 * self.value_dim)
        self.in_proj_ba = Linear(config.hidden_size, 2 * self.num_v_heads)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """mixed q, k, v [tokens, channels], z [tokens, value heads, dim], b and a [tokens, value heads].

        The outputs are grouped by key head: its query, its key, and the values (z, b, a) of the value heads sharing it.
        """
        qkvz = self.in_proj_qkvz(hidden).unflatten(-1, (self.num_k_heads, -1))
        ba = self.in_proj_ba(hidden).unflatten(-1, (self.num_k_heads, -1))
        shared = self.num_v_heads // self.num_k_heads
        sizes = [self.head_k_dim, self.head_k_dim, shared * self.head_v_dim, shared * self.head_v_dim]
        *qkv, z = qkvz.split(sizes, dim=-1)  # [tokens, key heads, size]
        b, a = ba.split(shared, dim=-1)
        mixed_qkv = torch.cat([part.flatten(1) for part in qkv], dim=-1)
        return mixed_qkv, z.reshape(-1, self.num_v_heads, self.head_v_dim), b.flatten(1), a.flatten(1)

    def forward(self, hidden: Tensor, batch: ForwardBatch, state: Mapping[str, StateView]) -> Tensor:
        mixed_qkv, z, b, a = self.project(hidden)
        mixed_qkv = self.conv1d(mixed_qkv, batch, state["conv"])
        q, k, v = mixed_qkv.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        q, k = (part.unflatten(-1, (-1, self.head_k_dim)) for part in (q, k))  # [tokens, key heads, dim]
        v = v.unflatten(-1, (-1, self.head_v_dim))
        g, beta = self.gates(a, b, self.A_log, self.dt_bias)  # log decay in float32, and how much is written
        core_attn_out = self.delta_rule(q, k, v, g, beta, batch, state["state"])
        output: Tensor = self.out_proj(self.norm(core_attn_out, z).flatten(1))
        return output


class Qwen3NextSparseMoeBlock(Qwen2MoeSparseMoeBlock):
    """Qwen2-MoE's: routed experts, and a shared one behind a sigmoid gate."""


class Qwen3NextDecoderLayer(nn.Module):
    delta_net: ClassVar[type[nn.Module]] = Qwen3NextGatedDeltaNet

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.block_type = config.layer_types[layer]
        if self.block_type == LINEAR:
            self.linear_attn = self.delta_net(config)
        else:
            self.self_attn = Qwen3NextAttention(config)
        self.mlp = self.make_mlp(config, layer)
        self.input_layernorm = Qwen3NextRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3NextRMSNorm(config.hidden_size, config.rms_norm_eps)

    @classmethod
    def make_mlp(cls, config: Any, layer: int) -> nn.Module:
        if is_sparse(config, layer):
            return Qwen3NextSparseMoeBlock(config)
        return GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)

    def forward(
        self,
        hidden: Tensor,
        position_embeddings: PositionEmbeddings,
        batch: ForwardBatch,
        state: Mapping[str, StateView],
    ) -> Tensor:
        normed = self.input_layernorm(hidden)
        if self.block_type == LINEAR:
            hidden = hidden + self.linear_attn(normed, batch, state)
        else:
            hidden = hidden + self.self_attn(normed, position_embeddings, batch, state["kv"])
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Qwen3NextModel(nn.Module):
    decoder_layer: ClassVar[type[nn.Module]] = Qwen3NextDecoderLayer

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.decoder_layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Qwen3NextRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(rotary_dim(config), self.rope(config))

    @staticmethod
    def rope(config: Any) -> RopeParameters:
        return rope_parameters(config)

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden = self.embed_tokens(batch.input_ids)  # [tokens, hidden]
        position_embeddings = self.rotary_emb(batch.positions)
        for layer, layer_state in zip(self.layers, state, strict=True):
            hidden = layer(hidden, position_embeddings, batch, layer_state)
        output: Tensor = self.norm(hidden)
        return output


class Qwen3NextForCausalLM(nn.Module):
    model_class: ClassVar[type[nn.Module]] = Qwen3NextModel

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


MTP = Skip(r"mtp\..*", "multi-token prediction: drafts are made without it")


def layers_of(config: Any, *kinds: str) -> dict[str, Sequence[int]]:
    """The layers of these types, as the `over` of a weight."""
    return {"layer": [layer for layer, each in enumerate(config.layer_types) if each in kinds]}


def full_attention_weights(config: Any, *kinds: str) -> list[Descriptor]:
    """Fused q (with its gate), k and v, the output projection, and the norms of q and k."""
    hidden, over, prefix = config.hidden_size, layers_of(config, *(kinds or (FULL,))), LAYER + "self_attn."
    heads = Axis("q heads", config.num_attention_heads, config.head_dim)
    gated = Axis("q heads", config.num_attention_heads, 2 * config.head_dim)
    kv_heads = Axis("kv heads", config.num_key_value_heads, config.head_dim, replicable=True)
    parts = {"q_proj": gated, "k_proj": kv_heads, "v_proj": kv_heads}
    sources: dict[str, Any] = {
        "qkv_proj.weight": Concat(
            tuple(FromCheckpoint(f"{prefix}{n}.weight", (axis, hidden)) for n, axis in parts.items())
        ),
        "o_proj.weight": FromCheckpoint(prefix + "o_proj.weight", (hidden, heads)),
        "q_norm.weight": FromCheckpoint(prefix + "q_norm.weight", (config.head_dim,)),
        "k_norm.weight": FromCheckpoint(prefix + "k_norm.weight", (config.head_dim,)),
    }
    if config.attention_bias:
        sources["qkv_proj.bias"] = Concat(
            tuple(FromCheckpoint(f"{prefix}{n}.bias", (axis,)) for n, axis in parts.items())
        )
        sources["o_proj.bias"] = FromCheckpoint(prefix + "o_proj.bias", (hidden,))
    return [Weight(parameter=prefix + name, source=source, over=over) for name, source in sources.items()]


def delta_net_weights(config: Any, in_projections: Mapping[str, Source]) -> list[Descriptor]:
    """The input projections as given, and the rest under its own names."""
    over, prefix = layers_of(config, LINEAR), LAYER + "linear_attn."
    key_dim = config.linear_key_head_dim * config.linear_num_key_heads
    values = Axis("value heads", config.linear_num_value_heads, config.linear_value_head_dim)
    own: dict[str, tuple[int | Axis, ...]] = {
        "conv1d.weight": (2 * key_dim + values.size, 1, config.linear_conv_kernel_dim),
        "dt_bias": (config.linear_num_value_heads,),
        "A_log": (config.linear_num_value_heads,),
        "norm.weight": (config.linear_value_head_dim,),
        "out_proj.weight": (config.hidden_size, values),
    }
    sources = {**in_projections, **{name: FromCheckpoint(prefix + name, dims) for name, dims in own.items()}}
    return [Weight(parameter=prefix + name, source=source, over=over) for name, source in sources.items()]


def grouped_in_projections(config: Any) -> dict[str, Source]:
    keys = Axis("key heads", config.linear_num_key_heads)
    shared = config.linear_num_value_heads // keys.count
    qkvz = replace(keys, unit=2 * config.linear_key_head_dim + 2 * shared * config.linear_value_head_dim)
    sizes = {"in_proj_qkvz.weight": qkvz, "in_proj_ba.weight": replace(keys, unit=2 * shared)}
    prefix = LAYER + "linear_attn."
    return {name: FromCheckpoint(prefix + name, (axis, config.hidden_size)) for name, axis in sizes.items()}


def weight_descriptors(config: Any) -> WeightDescriptors:
    sparse = sparse_layers(config)
    attention = [*full_attention_weights(config), *delta_net_weights(config, grouped_in_projections(config))]
    mlps = [*dense_mlp_weights(config), *shared_expert_weights(config, sparse)]
    return moe_weight_descriptors(config, [*outer_weights(config), *attention, *mlps, MTP], sparse)


def layer_states(config: Any, kind: str) -> dict[str, PagedState | SlotState]:
    if kind != LINEAR:
        axes = {"kv": 2, "kv heads": config.num_key_value_heads, "head dim": config.head_dim}
        return {"kv": PagedState(axes=axes, shard="kv heads")}
    keys, values = config.linear_key_head_dim, config.linear_value_head_dim
    heads = config.linear_num_value_heads
    channels = 2 * keys * config.linear_num_key_heads + values * heads
    return {
        "conv": SlotState(axes={"channels": channels, "taps": config.linear_conv_kernel_dim - 1}),
        "state": SlotState(axes={"heads": heads, "key": keys, "value": values}, shard="heads", dtype="float32"),
    }


def state_descriptors(config: Any) -> StateDescriptors:
    return StateDescriptors([layer_states(config, kind) for kind in config.layer_types])


def accepts(config: Any) -> Support:
    """Only layers of the two types that the reference computes."""
    others = sorted(set(config.layer_types) - {LINEAR, FULL})
    return Support.unless(bool(others) and f"layer_types {', '.join(others)}: only {LINEAR} and {FULL} are known")
