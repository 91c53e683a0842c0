"""Qwen1.5-MoE and Qwen2-57B (`Qwen2MoeForCausalLM`); reads beside transformers' modeling_qwen2_moe.py.

Qwen2 with routed experts and a shared expert behind a sigmoid gate on the layers that are not dense.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from rtp_kernel.components import Experts, Gate, GatedMLP, Linear, TopKRouter
from rtp_runtime.weights import (
    Axis,
    Concat,
    Descriptor,
    FromCheckpoint,
    Layout,
    Stack,
    Weight,
    WeightDescriptors,
)

from .qwen2 import (
    LAYER,
    Qwen2Attention,
    Qwen2DecoderLayer,
    Qwen2ForCausalLM,
    Qwen2Model,
    attention_weights,
    mlp_weights,
    outer_weights,
    state_descriptors,
)

__all__ = ["Qwen2MoeForCausalLM", "state_descriptors", "weight_descriptors"]


class Qwen2MoeAttention(Qwen2Attention):
    @staticmethod
    def biases(config: Any) -> tuple[bool, bool]:
        return config.qkv_bias, False


class RoutedExperts(nn.Module):
    """The routed part of a sparse block."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, experts = config.hidden_size, config.num_experts
        self.gate = TopKRouter(
            hidden, experts, config.num_experts_per_tok, score="softmax", renormalize=self.renormalizes(config)
        )
        self.experts = Experts(experts, hidden, config.moe_intermediate_size, config.hidden_act)

    @staticmethod
    def renormalizes(config: Any) -> bool:
        """Whether the weights of the chosen experts are made to add up to 1."""
        renormalizes: bool = config.norm_topk_prob
        return renormalizes

    def forward(self, hidden: Tensor) -> Tensor:
        weights, ids = self.gate(hidden)  # [tokens, experts per token]
        output: Tensor = self.experts(hidden, weights, ids)
        return output


class Qwen2MoeSparseMoeBlock(RoutedExperts):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.shared_expert = GatedMLP(hidden, config.shared_expert_intermediate_size, config.hidden_act)
        self.shared_expert_gate = Linear(hidden, 1)
        self.share = Gate("sigmoid")

    def forward(self, hidden: Tensor) -> Tensor:
        shared = self.share(self.shared_expert_gate(hidden), self.shared_expert(hidden))
        output: Tensor = super().forward(hidden) + shared
        return output


def is_sparse(config: Any, layer: int) -> bool:
    """Whether the layer routes to experts; the others have one dense MLP."""
    step: int = config.decoder_sparse_step
    return layer not in config.mlp_only_layers and config.num_experts > 0 and (layer + 1) % step == 0


class Qwen2MoeDecoderLayer(Qwen2DecoderLayer):
    attention: ClassVar[type[nn.Module]] = Qwen2MoeAttention
    sparse_block: ClassVar[type[nn.Module]] = Qwen2MoeSparseMoeBlock

    @classmethod
    def make_mlp(cls, config: Any, layer: int) -> nn.Module:
        return cls.sparse_block(config) if is_sparse(config, layer) else super().make_mlp(config, layer)


class Qwen2MoeModel(Qwen2Model):
    decoder_layer = Qwen2MoeDecoderLayer


class Qwen2MoeForCausalLM(Qwen2ForCausalLM):
    model_class = Qwen2MoeModel


def hub_expert_weights(config: Any, sparse: dict[str, list[int]]) -> list[Descriptor]:
    """One tensor per expert and projection, as on the hub."""
    hidden, experts = config.hidden_size, Axis("experts", config.num_experts)
    intermediate = Axis("intermediate", config.moe_intermediate_size)
    prefix = LAYER + "mlp.experts."
    gate, up = (
        FromCheckpoint(f"{prefix}{{expert}}.{name}.weight", (intermediate, hidden)) for name in ("gate_proj", "up_proj")
    )
    down = FromCheckpoint(prefix + "{expert}.down_proj.weight", (hidden, intermediate))
    return [
        Weight(parameter=prefix + "gate_up_proj", source=Stack(Concat((gate, up)), "expert", experts), over=sparse),
        Weight(parameter=prefix + "down_proj", source=Stack(down, "expert", experts), over=sparse),
    ]


def fused_expert_weights(config: Any, sparse: dict[str, list[int]]) -> list[Descriptor]:
    """The stacked tensors that transformers holds in memory: gate first, then up."""
    hidden, experts = config.hidden_size, Axis("experts", config.num_experts)
    intermediate = Axis("intermediate", config.moe_intermediate_size)
    prefix = LAYER + "mlp.experts."
    gate_up = FromCheckpoint(prefix + "gate_up_proj", (experts, 2 * intermediate.size, hidden))
    down = FromCheckpoint(prefix + "down_proj", (experts, hidden, intermediate))
    return [
        Weight(parameter=prefix + "gate_up_proj", source=gate_up, over=sparse),
        Weight(parameter=prefix + "down_proj", source=down, over=sparse),
    ]


def sparse_layers(config: Any) -> dict[str, list[int]]:
    """The layers that route to experts, as the `over` of a weight."""
    return {"layer": [layer for layer in range(config.num_hidden_layers) if is_sparse(config, layer)]}


def dense_mlp_weights(config: Any) -> list[Descriptor]:
    """The MLPs of the layers that do not route."""
    dense = {"layer": [layer for layer in range(config.num_hidden_layers) if not is_sparse(config, layer)]}
    return mlp_weights(LAYER + "mlp.", config.hidden_size, config.intermediate_size, dense)


def moe_weight_descriptors(config: Any, common: list[Descriptor], sparse: dict[str, list[int]]) -> WeightDescriptors:
    """`common` with routers and experts, for per-expert tensors and for stacked ones."""
    gate = LAYER + "mlp.gate.weight"
    router = Weight(parameter=gate, source=FromCheckpoint(gate, (config.num_experts, config.hidden_size)), over=sparse)
    common = [*common, router]
    fused = Layout("fused experts", (*common, *fused_expert_weights(config, sparse)))
    return WeightDescriptors(*common, *hub_expert_weights(config, sparse), others=[fused])


def shared_expert_weights(config: Any, sparse: dict[str, list[int]]) -> list[Descriptor]:
    gate = LAYER + "mlp.shared_expert_gate.weight"
    prefix = LAYER + "mlp.shared_expert."
    return [
        *mlp_weights(prefix, config.hidden_size, config.shared_expert_intermediate_size, sparse),
        Weight(parameter=gate, source=FromCheckpoint(gate, (1, config.hidden_size)), over=sparse),
    ]


def weight_descriptors(config: Any) -> WeightDescriptors:
    sparse = sparse_layers(config)
    common = [*outer_weights(config), *attention_weights(config, qkv_bias=config.qkv_bias), *dense_mlp_weights(config)]
    return moe_weight_descriptors(config, [*common, *shared_expert_weights(config, sparse)], sparse)
