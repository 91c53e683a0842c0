"""Qwen3.5, dense (`Qwen3_5ForCausalLM`, `Qwen3_5ForConditionalGeneration`); reads beside modeling_qwen3_5.py.

Qwen3-Next with flat input projections and a dense MLP, whose angles turn by time, height and width in turns. Of the
vision-language wrapper the language model is computed: the tensors of the vision tower are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from rtp_kernel.batch import Build
from rtp_kernel.components import GatedMLP, Linear, MergedLinear, RopeParameters
from rtp_kernel.registry import Support
from rtp_runtime.model import rope_parameters, text_config
from rtp_runtime.state import StateDescriptors
from rtp_runtime.weights import (
    Axis,
    Concat,
    Descriptor,
    FromCheckpoint,
    Layout,
    Skip,
    Source,
    WeightDescriptors,
    renamed,
)

from . import qwen3_next
from .qwen2 import LAYER, mlp_weights, outer_weights
from .qwen3_next import (
    MTP,
    Qwen3NextDecoderLayer,
    Qwen3NextForCausalLM,
    Qwen3NextGatedDeltaNet,
    Qwen3NextModel,
    delta_net_weights,
    full_attention_weights,
)

SECTIONS = (11, 11, 10)
"""`mrope_section` of a config that has none."""
VISION = Skip(r"model\.visual\..*", "the vision tower: only text is computed")


class Qwen3_5GatedDeltaNet(Qwen3NextGatedDeltaNet):  # noqa: N801
    def make_in_projections(self, config: Any) -> None:
        parts = {"in_proj_qkv": 2 * self.key_dim + self.value_dim, "in_proj_z": self.value_dim}
        self.in_proj_qkvz = MergedLinear(config.hidden_size, parts)
        self.in_proj_b = Linear(config.hidden_size, self.num_v_heads)
        self.in_proj_a = Linear(config.hidden_size, self.num_v_heads)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mixed_qkv, z = self.in_proj_qkvz(hidden)
        return mixed_qkv, z.unflatten(-1, (-1, self.head_v_dim)), self.in_proj_b(hidden), self.in_proj_a(hidden)


class Qwen3_5DecoderLayer(Qwen3NextDecoderLayer):  # noqa: N801
    delta_net = Qwen3_5GatedDeltaNet

    @classmethod
    def make_mlp(cls, config: Any, layer: int) -> nn.Module:
        return GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)


class Qwen3_5TextModel(Qwen3NextModel):  # noqa: N801
    decoder_layer = Qwen3_5DecoderLayer

    @staticmethod
    def rope(config: Any) -> RopeParameters:
        rope = rope_parameters(config)
        return replace(rope, mrope_section=rope.mrope_section or SECTIONS, mrope_interleaved=True)


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):  # noqa: N801
    model_class = Qwen3_5TextModel

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(text_config(config), build)


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):  # noqa: N801
    """The language model under the wrapper's name."""


def also_nested(text: WeightDescriptors) -> WeightDescriptors:
    """Each layout under the names of the text class, and under those of the wrapper."""
    nested = [
        Layout(f"{layout.name}, wrapper", renamed(layout.descriptors, {"model.": "model.language_model."}))
        for layout in text.layouts
    ]
    first, *others = text.layouts
    return WeightDescriptors(*first.descriptors, name=first.name, others=[*others, *nested])


def flat_in_projections(config: Any) -> dict[str, Source]:
    """q, k, v and z fused in this order; b and a on their own."""
    hidden, prefix = config.hidden_size, LAYER + "linear_attn."
    values = Axis("value heads", config.linear_num_value_heads, config.linear_value_head_dim)
    qkv = 2 * config.linear_key_head_dim * config.linear_num_key_heads + values.size
    heads = replace(values, unit=1)
    fused = (
        FromCheckpoint(prefix + "in_proj_qkv.weight", (qkv, hidden)),
        FromCheckpoint(prefix + "in_proj_z.weight", (values, hidden)),
    )
    return {
        "in_proj_qkvz.weight": Concat(fused),
        "in_proj_b.weight": FromCheckpoint(prefix + "in_proj_b.weight", (heads, hidden)),
        "in_proj_a.weight": FromCheckpoint(prefix + "in_proj_a.weight", (heads, hidden)),
    }


def attention_weights(config: Any) -> list[Descriptor]:
    return [*full_attention_weights(config), *delta_net_weights(config, flat_in_projections(config))]


def weight_descriptors(config: Any) -> WeightDescriptors:
    text = text_config(config)
    layers = {"layer": range(text.num_hidden_layers)}
    mlps = mlp_weights(LAYER + "mlp.", text.hidden_size, text.intermediate_size, layers)
    return also_nested(WeightDescriptors(*outer_weights(text), *attention_weights(text), *mlps, MTP, VISION))


def state_descriptors(config: Any) -> StateDescriptors:
    return qwen3_next.state_descriptors(text_config(config))


def accepts(config: Any) -> Support:
    return qwen3_next.accepts(text_config(config))
