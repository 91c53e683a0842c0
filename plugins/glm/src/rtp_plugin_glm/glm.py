"""GLM-4-9B (`GlmForCausalLM`); reads beside transformers' modeling_glm.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from rtp_kernel.batch import Build, ForwardBatch, ModelState, StateView
from rtp_kernel.components import Attention, Embedding, GatedMLP, Linear, MergedLinear, RMSNorm, Rotary, RotaryEmbedding
from rtp_runtime.model import rope_parameters
from rtp_runtime.state import PagedState, StateDescriptors
from rtp_runtime.weights import Axis, Concat, Descriptor, FromCheckpoint, Tie, Weight, WeightDescriptors

PositionEmbeddings = tuple[Tensor, Tensor]
"""cos and sin of the step's positions, [tokens, rotary dim] each."""


def head_dim(config: Any) -> int:
    """The config's own value, which Glm4MoeConfig does not declare, or hidden / heads."""
    declared: int | None = getattr(config, "head_dim", None)
    return declared or config.hidden_size // config.num_attention_heads


def turned_part(config: Any, dim: int) -> int:
    """How many of the `dim` leading dimensions are turned: all where the share is absent, as in the reference."""
    return int(dim * config.rope_parameters.get("partial_rotary_factor", 1.0))


class GlmAttention(nn.Module):
    layout: ClassVar[str] = "interleaved"

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = head_dim(config)
        q_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, bias=config.attention_bias)
        self.o_proj = Linear(q_size, config.hidden_size)
        self.rotary = Rotary(self.layout)
        self.attn = Attention(config.num_attention_heads, config.num_key_value_heads, self.head_dim)

    def forward(
        self, hidden: Tensor, position_embeddings: PositionEmbeddings, batch: ForwardBatch, kv: StateView
    ) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj(hidden))  # [tokens, heads, dim]
        q, k = self.rotary(q, k, *position_embeddings)
        output: Tensor = self.o_proj(self.attn(q, k, v, batch, kv))
        return output


class GlmDecoderLayer(nn.Module):
    attention: ClassVar[type[nn.Module]] = GlmAttention

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.self_attn = self.attention(config)
        self.mlp = self.make_mlp(config, layer)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @classmethod
    def make_mlp(cls, config: Any, layer: int) -> nn.Module:
        return GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)

    def forward(
        self,
        hidden: Tensor,
        position_embeddings: PositionEmbeddings,
        batch: ForwardBatch,
        state: Mapping[str, StateView],
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), position_embeddings, batch, state["kv"])
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class GlmModel(nn.Module):
    decoder_layer: ClassVar[type[nn.Module]] = GlmDecoderLayer

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.decoder_layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(self.rotary_dim(config), rope_parameters(config))

    @staticmethod
    def rotary_dim(config: Any) -> int:
        return turned_part(config, head_dim(config))

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden = self.embed_tokens(batch.input_ids)  # [tokens, hidden]
        position_embeddings = self.rotary_emb(batch.positions)
        for layer, layer_state in zip(self.layers, state, strict=True):
            hidden = layer(hidden, position_embeddings, batch, layer_state)
        output: Tensor = self.norm(hidden)
        return output


class GlmForCausalLM(nn.Module):
    model_class: ClassVar[type[nn.Module]] = GlmModel

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


LAYER = "model.layers.{layer}."


def all_layers(config: Any) -> dict[str, range]:
    return {"layer": range(config.num_hidden_layers)}


def norm_weights(config: Any, *names: str) -> list[Descriptor]:
    """Vectors of the hidden size in every layer, each under its own name."""
    return [
        Weight(
            parameter=LAYER + name, source=FromCheckpoint(LAYER + name, (config.hidden_size,)), over=all_layers(config)
        )
        for name in names
    ]


def outer_weights(config: Any) -> list[Descriptor]:
    """The two norms that every layer has, the embedding, the final norm and the head."""
    table = (Axis("vocab", config.vocab_size), config.hidden_size)
    embedding, norm, head = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
    return [
        *norm_weights(config, "input_layernorm.weight", "post_attention_layernorm.weight"),
        Weight(parameter=embedding, source=FromCheckpoint(embedding, table)),
        Weight(parameter=norm, source=FromCheckpoint(norm, (config.hidden_size,))),
        Tie(head, embedding)
        if config.tie_word_embeddings
        else Weight(parameter=head, source=FromCheckpoint(head, table)),
    ]


def attention_weights(config: Any) -> list[Descriptor]:
    """Fused q, k, v in this order, with biases by config, and the output projection, which never has one."""
    q_heads = Axis("q heads", config.num_attention_heads, head_dim(config))
    kv_heads = Axis("kv heads", config.num_key_value_heads, head_dim(config), replicable=True)
    parts, prefix = {"q_proj": q_heads, "k_proj": kv_heads, "v_proj": kv_heads}, LAYER + "self_attn."
    hidden, layers = config.hidden_size, all_layers(config)
    qkv = Concat(tuple(FromCheckpoint(f"{prefix}{name}.weight", (axis, hidden)) for name, axis in parts.items()))
    output = FromCheckpoint(prefix + "o_proj.weight", (hidden, q_heads))
    weights: list[Descriptor] = [
        Weight(parameter=prefix + "qkv_proj.weight", source=qkv, over=layers),
        Weight(parameter=prefix + "o_proj.weight", source=output, over=layers),
    ]
    if config.attention_bias:
        biases = Concat(tuple(FromCheckpoint(f"{prefix}{name}.bias", (axis,)) for name, axis in parts.items()))
        weights.append(Weight(parameter=prefix + "qkv_proj.bias", source=biases, over=layers))
    return weights


def fused_mlp_weights(config: Any) -> list[Descriptor]:
    """A gated MLP whose gate and up (in this order) are one tensor in the checkpoint too."""
    prefix, hidden, layers = LAYER + "mlp.", config.hidden_size, all_layers(config)
    gate_up = FromCheckpoint(prefix + "gate_up_proj.weight", (2 * config.intermediate_size, hidden))
    down = FromCheckpoint(prefix + "down_proj.weight", (hidden, Axis("intermediate", config.intermediate_size)))
    return [
        Weight(parameter=prefix + "gate_up_proj.weight", source=gate_up, over=layers),
        Weight(parameter=prefix + "down_proj.weight", source=down, over=layers),
    ]


def weight_descriptors(config: Any) -> WeightDescriptors:
    return WeightDescriptors(*outer_weights(config), *attention_weights(config), *fused_mlp_weights(config))


def state_descriptors(config: Any) -> StateDescriptors:
    axes = {"kv": 2, "kv heads": config.num_key_value_heads, "head dim": head_dim(config)}
    return StateDescriptors([{"kv": PagedState(axes=axes, shard="kv heads")} for _ in range(config.num_hidden_layers)])
