"""Qwen3-VL's language model (`Qwen3VLForConditionalGeneration`); reads beside transformers' modeling_qwen3_vl.py.

Qwen3 whose angles turn by time, height and width in turns. Images are not computed: the tensors of the vision tower and
of its deepstack mergers are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rtp_kernel.batch import Build
from rtp_kernel.components import RopeParameters
from rtp_runtime.model import rope_parameters, text_config
from rtp_runtime.state import StateDescriptors
from rtp_runtime.weights import Skip, WeightDescriptors, renamed

from . import qwen3
from .qwen2 import kv_state
from .qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3ForCausalLM, Qwen3Model

SECTIONS = (24, 20, 20)
"""`mrope_section` of a config that has none."""
VISION = Skip(r"model\.visual\..*", "the vision tower: only text is computed")


class Qwen3VLTextAttention(Qwen3Attention):
    @staticmethod
    def window(config: Any, layer: int) -> int | None:
        return None


class Qwen3VLTextDecoderLayer(Qwen3DecoderLayer):
    attention = Qwen3VLTextAttention


class Qwen3VLTextModel(Qwen3Model):
    decoder_layer = Qwen3VLTextDecoderLayer

    @staticmethod
    def rope(config: Any) -> RopeParameters:
        rope = rope_parameters(config)
        return replace(rope, mrope_section=rope.mrope_section or SECTIONS, mrope_interleaved=True)


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    model_class = Qwen3VLTextModel

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(text_config(config), build)


def weight_descriptors(config: Any) -> WeightDescriptors:
    text = qwen3.weight_descriptors(text_config(config)).layouts[0].descriptors
    return WeightDescriptors(*renamed(text, {"model.": "model.language_model."}), VISION)


def state_descriptors(config: Any) -> StateDescriptors:
    text = text_config(config)
    return StateDescriptors([{"kv": kv_state(text, None)} for _ in range(text.num_hidden_layers)])
