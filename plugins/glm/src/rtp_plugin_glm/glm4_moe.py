"""GLM-4.5, 4.6 and 4.7 (`Glm4MoeForCausalLM`); reads beside transformers' modeling_glm4_moe.py.

GLM's attention turned in halves, with per-head norms by config, over dense layers and then DeepSeek-V3's experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components import Experts, GatedMLP, RMSNorm, TopKRouter
from rtp_kernel.registry import Support
from rtp_runtime.weights import Axis, Concat, Descriptor, FromCheckpoint, Layout, Skip, Stack, Weight, WeightDescriptors

from .glm import (
    LAYER,
    GlmAttention,
    GlmDecoderLayer,
    GlmForCausalLM,
    GlmModel,
    PositionEmbeddings,
    all_layers,
    attention_weights,
    head_dim,
    outer_weights,
    state_descriptors,
)

__all__ = ["Glm4MoeForCausalLM", "accepts", "state_descriptors", "weight_descriptors"]


class Glm4MoeAttention(GlmAttention):
    layout = "half"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.use_qk_norm = config.use_qk_norm
        if self.use_qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self, hidden: Tensor, position_embeddings: PositionEmbeddings, batch: ForwardBatch, kv: StateView
    ) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj(hidden))  # [tokens, heads, dim]
        if self.use_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary(q, k, *position_embeddings)
        output: Tensor = self.o_proj(self.attn(q, k, v, batch, kv))
        return output


class Glm4MoeTopkRouter(TopKRouter):
    """Weight and product are float32 whatever the model's dtype."""

    def __init__(self, config: Any) -> None:
        super().__init__(
            config.hidden_size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            score="sigmoid",
            renormalize=config.norm_topk_prob,
            renormalize_eps=1e-20,
            scale=config.routed_scaling_factor,
            bias=True,
            groups=config.n_group,
            top_groups=config.topk_group,
            dtype=torch.float32,
        )


class Glm4MoeMoE(nn.Module):
    """Routed experts beside shared ones, which are one MLP. `limit` clamps what both gate."""

    def __init__(self, config: Any, *, activation: str | None = None, limit: float | None = None) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.moe_intermediate_size
        self.experts = Experts(config.n_routed_experts, hidden, intermediate, activation or config.hidden_act, limit)
        self.gate = Glm4MoeTopkRouter(config)
        self.shared_experts = GatedMLP(hidden, intermediate * config.n_shared_experts, config.hidden_act, limit=limit)

    def forward(self, hidden: Tensor) -> Tensor:
        weights, ids = self.gate(hidden)  # [tokens, experts per token]
        output: Tensor = self.experts(hidden, weights, ids) + self.shared_experts(hidden)
        return output


class Glm4MoeDecoderLayer(GlmDecoderLayer):
    attention = Glm4MoeAttention

    @classmethod
    def make_mlp(cls, config: Any, layer: int) -> nn.Module:
        return super().make_mlp(config, layer) if layer < config.first_k_dense_replace else Glm4MoeMoE(config)


class Glm4MoeModel(GlmModel):
    decoder_layer = Glm4MoeDecoderLayer


class Glm4MoeForCausalLM(GlmForCausalLM):
    model_class = Glm4MoeModel


def routing_reason(config: Any) -> str | None:
    """Why the config asks for experts chosen otherwise than the reference does, or None."""
    for name, value in {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items():
        asked = getattr(config, name, None)
        if asked not in (None, value):
            return f"{name} is {asked!r}; only {value!r} is computed, whatever the config says to transformers"
    members = config.n_routed_experts // config.n_group
    if config.n_routed_experts % config.n_group or members < 2:
        return f"{config.n_routed_experts} experts in n_group {config.n_group}: groups must be even and have 2 or more"
    if config.topk_group * members < config.num_experts_per_tok:
        return f"topk_group {config.topk_group} leaves fewer experts than num_experts_per_tok"
    return None


def accepts(config: Any) -> Support:
    return Support.unless(routing_reason(config))


Over = dict[str, Sequence[int]]


def qk_norm_weights(config: Any) -> list[Descriptor]:
    names = (LAYER + "self_attn.q_norm.weight", LAYER + "self_attn.k_norm.weight")
    source = {name: FromCheckpoint(name, (head_dim(config),)) for name in names if config.use_qk_norm}
    return [Weight(parameter=name, source=source[name], over=all_layers(config)) for name in source]


def mlp_weights(prefix: str, hidden: int, size: int, over: Over) -> list[Descriptor]:
    """A gated MLP: gate and up fused in this order."""
    intermediate = Axis("intermediate", size)
    gate, up = (FromCheckpoint(f"{prefix}{name}.weight", (intermediate, hidden)) for name in ("gate_proj", "up_proj"))
    down = FromCheckpoint(prefix + "down_proj.weight", (hidden, intermediate))
    return [
        Weight(parameter=prefix + "gate_up_proj.weight", source=Concat((gate, up)), over=over),
        Weight(parameter=prefix + "down_proj.weight", source=down, over=over),
    ]


def router_weights(config: Any, sparse: Over) -> list[Descriptor]:
    weight, bias = LAYER + "mlp.gate.weight", LAYER + "mlp.gate.e_score_correction_bias"
    shapes = {weight: (config.n_routed_experts, config.hidden_size), bias: (config.n_routed_experts,)}
    return [
        Weight(parameter=name, source=FromCheckpoint(name, shape), over=sparse, dtype="float32")
        for name, shape in shapes.items()
    ]


def hub_expert_weights(config: Any, sparse: Over) -> list[Descriptor]:
    """One tensor per expert and projection, as on the hub."""
    hidden, experts = config.hidden_size, Axis("experts", config.n_routed_experts)
    intermediate, prefix = Axis("intermediate", config.moe_intermediate_size), LAYER + "mlp.experts."
    gate, up = (
        FromCheckpoint(f"{prefix}{{expert}}.{name}.weight", (intermediate, hidden)) for name in ("gate_proj", "up_proj")
    )
    down = FromCheckpoint(prefix + "{expert}.down_proj.weight", (hidden, intermediate))
    return [
        Weight(parameter=prefix + "gate_up_proj", source=Stack(Concat((gate, up)), "expert", experts), over=sparse),
        Weight(parameter=prefix + "down_proj", source=Stack(down, "expert", experts), over=sparse),
    ]


def fused_expert_weights(config: Any, sparse: Over) -> list[Descriptor]:
    """The stacked tensors that transformers holds in memory: gate first, then up."""
    hidden, experts = config.hidden_size, Axis("experts", config.n_routed_experts)
    intermediate, prefix = Axis("intermediate", config.moe_intermediate_size), LAYER + "mlp.experts."
    gate_up = FromCheckpoint(prefix + "gate_up_proj", (experts, 2 * intermediate.size, hidden))
    down = FromCheckpoint(prefix + "down_proj", (experts, hidden, intermediate))
    return [
        Weight(parameter=prefix + "gate_up_proj", source=gate_up, over=sparse),
        Weight(parameter=prefix + "down_proj", source=down, over=sparse),
    ]


def skip_predictions(config: Any) -> Skip:
    """The layers that the hub's files hold behind the last one."""
    served = "|".join(str(layer) for layer in range(config.num_hidden_layers))
    pattern = rf"model\.(language_model\.)?layers\.(?!({served})\.)\d+\..*"
    return Skip(pattern, "multi-token prediction, which drafts tokens")


def moe_weight_descriptors(config: Any, common: list[Descriptor], sparse: Sequence[int]) -> WeightDescriptors:
    """`common` with dense MLPs, routers and experts (of layers `sparse`), for per-expert and for stacked tensors."""
    hidden, intermediate = config.hidden_size, config.moe_intermediate_size
    dense = [layer for layer in range(config.num_hidden_layers) if layer not in sparse]
    routed: Over = {"layer": sparse}
    shared = mlp_weights(LAYER + "mlp.shared_experts.", hidden, intermediate * config.n_shared_experts, routed)
    plain = mlp_weights(LAYER + "mlp.", hidden, config.intermediate_size, {"layer": dense})
    common = [*common, *plain, *shared, *router_weights(config, routed), skip_predictions(config)]
    fused = Layout("fused experts", (*common, *fused_expert_weights(config, routed)))
    return WeightDescriptors(*common, *hub_expert_weights(config, routed), others=[fused])


def weight_descriptors(config: Any) -> WeightDescriptors:
    common = [*outer_weights(config), *attention_weights(config), *qk_norm_weights(config)]
    return moe_weight_descriptors(config, common, range(config.first_k_dense_replace, config.num_hidden_layers))
