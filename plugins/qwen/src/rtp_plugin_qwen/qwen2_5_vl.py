"""Qwen2.5-VL's language model (`Qwen2_5_VLForConditionalGeneration`); reads beside modeling_qwen2_5_vl.py.

Qwen2 whose angles turn by time, height and width in contiguous sections. Images are not computed: the tensors of the
vision tower are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rtp_kernel.batch import Build
from rtp_kernel.components import RopeParameters
from rtp_runtime.model import rope_parameters, text_config
from rtp_runtime.state import StateDescriptors
from rtp_runtime.weights import Layout, Skip, WeightDescriptors, renamed

from . import qwen2
from .qwen2 import Qwen2ForCausalLM, Qwen2Model

SECTIONS = (16, 24, 24)
"""`mrope_section` of a config that has none."""
VISION = "the vision tower: only text is computed"


class Qwen2_5_VLTextModel(Qwen2Model):  # noqa: N801
    @staticmethod
    def rope(config: Any) -> RopeParameters:
        rope = rope_parameters(config)
        return replace(rope, mrope_section=rope.mrope_section or SECTIONS, mrope_interleaved=False)


class Qwen2_5_VLForConditionalGeneration(Qwen2ForCausalLM):  # noqa: N801
    model_class = Qwen2_5_VLTextModel

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(text_config(config), build)


def weight_descriptors(config: Any) -> WeightDescriptors:
    """The hub's names, and the names that transformers has in memory."""
    text = qwen2.weight_descriptors(text_config(config)).layouts[0].descriptors
    nested = renamed(text, {"model.": "model.language_model."})
    in_memory = Layout("transformers", (*nested, Skip(r"model\.visual\..*", VISION)))
    return WeightDescriptors(*text, Skip(r"visual\..*", VISION), others=(in_memory,))


def state_descriptors(config: Any) -> StateDescriptors:
    return qwen2.state_descriptors(text_config(config))
