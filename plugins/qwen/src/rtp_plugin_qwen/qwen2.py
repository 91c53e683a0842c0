"""Qwen2 and Qwen2.5 (`Qwen2ForCausalLM`); reads beside transformers' modeling_qwen2.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from rtp_kernel.batch import Build, ForwardBatch, ModelState, StateView
from rtp_kernel.components import (
    Attention,
    Embedding,
    GatedMLP,
    Linear,
    MergedLinear,
    RMSNorm,
    RopeParameters,
    Rotary,
    RotaryEmbedding,
)
from rtp_runtime.model import rope_parameters
from rtp_runtime.state import PagedState, StateDescriptors, WindowState
from rtp_runtime.weights import Axis, Concat, Descriptor, FromCheckpoint, Tie, Weight, WeightDescriptors

Rotation = tuple[Tensor, Tensor]
"""cos and sin of the step's positions, [tokens, head dim] each."""


def head_dim(config: Any) -> int:
    """The checkpoint's own value, which neither Qwen2Config nor Qwen3MoeConfig declares, or hidden / heads."""
    declared: int | None = getattr(config, "head_dim", None)
    return declared or config.hidden_size // config.num_attention_heads


def layer_window(config: Any, layer: int) -> int | None:
    """How many tokens a query of this layer sees, itself included; None = all."""
    window: int | None = config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
    return window


class Qwen2Attention(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.head_dim = head_dim(config)
        q_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        qkv_bias, output_bias = self.biases(config)
        self.qkv_proj = MergedLinear(
            config.hidden_size, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, bias=qkv_bias
        )
        self.o_proj = Linear(q_size, config.hidden_size, bias=output_bias)
        self.rotary = Rotary("half")
        self.attn = Attention(
            config.num_attention_heads, config.num_key_value_heads, self.head_dim, window=self.window(config, layer)
        )

    @staticmethod
    def biases(config: Any) -> tuple[bool, bool]:
        """Whether q, k, v and whether the output have one."""
        return True, False

    @staticmethod
    def window(config: Any, layer: int) -> int | None:
        return layer_window(config, layer)

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch, kv: StateView) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj(hidden))  # [tokens, heads, dim]
        q, k = self.rotary(q, k, *rotation)
        output: Tensor = self.o_proj(self.attn(q, k, v, batch, kv))
        return output


class Qwen2DecoderLayer(nn.Module):
    attention: ClassVar[type[nn.Module]] = Qwen2Attention

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self.attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = self.make_mlp(config, layer)

    @classmethod
    def make_mlp(cls, config: Any, layer: int) -> nn.Module:
        return GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)

    def forward(
        self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch, state: Mapping[str, StateView]
    ) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, batch, state["kv"])
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Qwen2Model(nn.Module):
    decoder_layer: ClassVar[type[nn.Module]] = Qwen2DecoderLayer

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.decoder_layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(head_dim(config), self.rope(config))

    @staticmethod
    def rope(config: Any) -> RopeParameters:
        return rope_parameters(config)

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden = self.embed_tokens(batch.input_ids)  # [tokens, hidden]
        rotation = self.rotary_emb(batch.positions)
        for layer, layer_state in zip(self.layers, state, strict=True):
            hidden = layer(hidden, rotation, batch, layer_state)
        output: Tensor = self.norm(hidden)
        return output


class Qwen2ForCausalLM(nn.Module):
    model_class: ClassVar[type[nn.Module]] = Qwen2Model

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


def attention_weights(config: Any, *, qkv_bias: bool, output_bias: bool = False) -> list[Descriptor]:
    """Fused q, k, v in this order, and the output projection."""
    q_heads = Axis("q heads", config.num_attention_heads, head_dim(config))
    kv_heads = Axis("kv heads", config.num_key_value_heads, head_dim(config), replicable=True)
    layers = {"layer": range(config.num_hidden_layers)}
    parts = {"q_proj": q_heads, "k_proj": kv_heads, "v_proj": kv_heads}
    prefix = LAYER + "self_attn."
    weights: list[Descriptor] = [
        Weight(
            parameter=prefix + "qkv_proj.weight",
            source=Concat(
                tuple(FromCheckpoint(f"{prefix}{n}.weight", (axis, config.hidden_size)) for n, axis in parts.items())
            ),
            over=layers,
        ),
        Weight(
            parameter=prefix + "o_proj.weight",
            source=FromCheckpoint(prefix + "o_proj.weight", (config.hidden_size, q_heads)),
            over=layers,
        ),
    ]
    if qkv_bias:
        biases = Concat(tuple(FromCheckpoint(f"{prefix}{name}.bias", (axis,)) for name, axis in parts.items()))
        weights.append(Weight(parameter=prefix + "qkv_proj.bias", source=biases, over=layers))
    if output_bias:
        bias = FromCheckpoint(prefix + "o_proj.bias", (config.hidden_size,))
        weights.append(Weight(parameter=prefix + "o_proj.bias", source=bias, over=layers))
    return weights


def mlp_weights(prefix: str, hidden_size: int, intermediate_size: int, over: Mapping[str, Any]) -> list[Descriptor]:
    """A gated MLP: gate and up fused in this order."""
    intermediate = Axis("intermediate", intermediate_size)
    gate, up = (FromCheckpoint(f"{prefix}{n}.weight", (intermediate, hidden_size)) for n in ("gate_proj", "up_proj"))
    down = FromCheckpoint(prefix + "down_proj.weight", (hidden_size, intermediate))
    return [
        Weight(parameter=prefix + "gate_up_proj.weight", source=Concat((gate, up)), over=over),
        Weight(parameter=prefix + "down_proj.weight", source=down, over=over),
    ]


def outer_weights(config: Any) -> list[Descriptor]:
    """The norms of every layer, the embedding, the final norm and the head, which small checkpoints tie."""
    hidden, layers = config.hidden_size, {"layer": range(config.num_hidden_layers)}
    table = (Axis("vocab", config.vocab_size), hidden)
    weights: list[Descriptor] = [
        Weight(parameter=name, source=FromCheckpoint(name, (hidden,)), over=layers)
        for name in (LAYER + "input_layernorm.weight", LAYER + "post_attention_layernorm.weight")
    ]
    weights.append(Weight(parameter="model.norm.weight", source=FromCheckpoint("model.norm.weight", (hidden,))))
    embedding = "model.embed_tokens.weight"
    weights.append(Weight(parameter=embedding, source=FromCheckpoint(embedding, table)))
    if config.tie_word_embeddings:
        weights.append(Tie("lm_head.weight", embedding))
    else:
        weights.append(Weight(parameter="lm_head.weight", source=FromCheckpoint("lm_head.weight", table)))
    return weights


def weight_descriptors(config: Any) -> WeightDescriptors:
    layers = {"layer": range(config.num_hidden_layers)}
    return WeightDescriptors(
        *outer_weights(config),
        *attention_weights(config, qkv_bias=True),
        *mlp_weights(LAYER + "mlp.", config.hidden_size, config.intermediate_size, layers),
    )


def kv_state(config: Any, window: int | None) -> PagedState | WindowState:
    axes = {"kv": 2, "kv heads": config.num_key_value_heads, "head dim": head_dim(config)}
    if window is None:
        return PagedState(axes=axes, shard="kv heads")
    return WindowState(axes=axes, shard="kv heads", window=window)


def state_descriptors(config: Any) -> StateDescriptors:
    layers = range(config.num_hidden_layers)
    return StateDescriptors([{"kv": kv_state(config, layer_window(config, layer))} for layer in layers])
