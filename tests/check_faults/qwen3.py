"""Copies of the Qwen3 model with one fault each."""

from __future__ import annotations

from typing import Any

import torch
from rtp_plugin_qwen.qwen3 import Qwen3ForCausalLM, state_descriptors, weight_descriptors
from torch import Tensor, nn

from rtp_kernel.batch import Build, ForwardBatch, ModelState
from rtp_kernel.components import Attention, GatedMLP, RMSNorm, Rotary, RotaryEmbedding
from rtp_kernel.components.base import Binding

__all__ = ["state_descriptors", "weight_descriptors"]


class InterleavedRotary(Qwen3ForCausalLM):
    """The rotary layout of another family."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        for layer in self.model.layers:
            layer.self_attn.rotary = Rotary("interleaved")


class HalfRotated(Qwen3ForCausalLM):
    """A partial rotary factor that the model does not have."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        rotary = self.model.rotary_emb
        self.model.rotary_emb = RotaryEmbedding(rotary.rotary_dim // 2, rotary.rope)


class TableInModelDtype(RotaryEmbedding):
    def bind(self, binding: Binding) -> None:
        super().bind(binding)
        self.inv_freq = self.inv_freq.to(binding.dtype)


class NarrowTable(Qwen3ForCausalLM):
    """A rotary table that follows the model's dtype: nothing shows in float32."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        rotary = self.model.rotary_emb
        self.model.rotary_emb = TableInModelDtype(rotary.rotary_dim, rotary.rope)


class RoundedAngles(RotaryEmbedding):
    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super().forward(positions)
        return cos.bfloat16().to(cos), sin.bfloat16().to(sin)


class NarrowAngles(Qwen3ForCausalLM):
    """cos and sin rounded to bfloat16."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        rotary = self.model.rotary_emb
        self.model.rotary_emb = RoundedAngles(rotary.rotary_dim, rotary.rope)


class AttentionScale(Qwen3ForCausalLM):
    """A softmax scale that is a little too large in layer 1."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        inner = self.model.layers[1].self_attn.attn
        scale = inner.scale * 1.00005
        self.model.layers[1].self_attn.attn = Attention(
            inner.num_heads, inner.num_kv_heads, inner.head_dim, scale=scale
        )


class NormPlusOne(Qwen3ForCausalLM):
    """1 + w where the weight is w."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[1].post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)


class NormEps(Qwen3ForCausalLM):
    """Another eps in one norm that reads large values."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[2].post_attention_layernorm.eps *= 30


class FinalNormEps(Qwen3ForCausalLM):
    """Another eps in the last norm."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.norm.eps *= 30


class KeyNormEps(Qwen3ForCausalLM):
    """Another eps in the norm of one layer's keys."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[1].self_attn.k_norm.eps *= 30


class WholeVectorNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.flatten(1).square().mean(-1)[:, None, None]
        return x * torch.rsqrt(mean + self.eps) * self.weight


class NormOverAllHeads(Qwen3ForCausalLM):
    """q normalised over the whole vector instead of per head."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[0].self_attn.q_norm = WholeVectorNorm(config.head_dim, config.rms_norm_eps)


class EmbeddingScaleModel(Qwen3ForCausalLM.model_class):  # type: ignore[misc, name-defined]
    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden = self.embed_tokens(batch.input_ids) * 1.0001
        rotation = self.rotary_emb(batch.positions)
        for layer, layer_state in zip(self.layers, state, strict=True):
            hidden = layer(hidden, rotation, batch, layer_state)
        output: Tensor = self.norm(hidden)
        return output


class EmbeddingScale(Qwen3ForCausalLM):
    """A scale of the embedding that the model does not have."""

    model_class = EmbeddingScaleModel


class ScaledResidualLayer(Qwen3ForCausalLM.model_class.decoder_layer):  # type: ignore[misc, name-defined]
    def forward(self, hidden: Tensor, *args: Any) -> Tensor:
        output: Tensor = super().forward(hidden, *args)
        return output + 0.0005 * hidden


class ResidualScale(Qwen3ForCausalLM):
    """A residual scale in layer 1."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[1] = ScaledResidualLayer(config, 1)


class LogitScale(Qwen3ForCausalLM):
    """A logit scale that the model does not have."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * 1.00005


class UnwrittenMLP(GatedMLP):
    def bind(self, binding: Binding) -> None:
        super().bind(binding)
        self.register_buffer("scale", torch.full((1,), float("nan"), dtype=binding.dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class NeverWritten(Qwen3ForCausalLM):
    """Memory that nobody filled."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[1].mlp = UnwrittenMLP(config.hidden_size, config.intermediate_size, config.hidden_act)


class WrongActivation(Qwen3ForCausalLM):
    """gelu for silu in one layer."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[2].mlp.activation = "gelu"


class TransposedHeads(nn.Module):
    """[heads, dim] taken for [dim, heads]."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.inner = attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
        mixed = v.flatten(1).unflatten(1, (v.shape[2], v.shape[1])).transpose(1, 2).contiguous()
        output: Tensor = self.inner(q, k, mixed, *args)
        return output


class MixedValueHeads(Qwen3ForCausalLM):
    """The heads of v interleaved in layer 2."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        layer = self.model.layers[2].self_attn
        layer.attn = TransposedHeads(layer.attn)
