"""Qwen3.5, sparse (`Qwen3_5MoeForCausalLM`, `Qwen3_5MoeForConditionalGeneration`); beside modeling_qwen3_5_moe.py.

Qwen3.5 with Qwen2-MoE's sparse block on every layer, its weights always renormalised.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from rtp_runtime.model import text_config
from rtp_runtime.weights import WeightDescriptors

from .qwen2 import outer_weights
from .qwen2_moe import Qwen2MoeSparseMoeBlock, moe_weight_descriptors, shared_expert_weights
from .qwen3_5 import (
    VISION,
    Qwen3_5DecoderLayer,
    Qwen3_5ForCausalLM,
    Qwen3_5TextModel,
    accepts,
    also_nested,
    attention_weights,
    state_descriptors,
)
from .qwen3_next import MTP

__all__ = [
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "accepts",
    "state_descriptors",
    "weight_descriptors",
]


class Qwen3_5MoeSparseMoeBlock(Qwen2MoeSparseMoeBlock):  # noqa: N801
    @staticmethod
    def renormalizes(config: Any) -> bool:
        return True


class Qwen3_5MoeDecoderLayer(Qwen3_5DecoderLayer):  # noqa: N801
    @classmethod
    def make_mlp(cls, config: Any, layer: int) -> nn.Module:
        return Qwen3_5MoeSparseMoeBlock(config)


class Qwen3_5MoeTextModel(Qwen3_5TextModel):  # noqa: N801
    decoder_layer = Qwen3_5MoeDecoderLayer


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):  # noqa: N801
    model_class = Qwen3_5MoeTextModel


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):  # noqa: N801
    """The language model under the wrapper's name."""


def weight_descriptors(config: Any) -> WeightDescriptors:
    text = text_config(config)
    sparse = {"layer": list(range(text.num_hidden_layers))}
    common = [*outer_weights(text), *attention_weights(text), *shared_expert_weights(text, sparse), MTP, VISION]
    return also_nested(moe_weight_descriptors(text, common, sparse))
