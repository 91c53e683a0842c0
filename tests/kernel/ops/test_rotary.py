"""Rotary tables and layouts against transformers', bit for bit."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Qwen2_5_VLTextConfig, Qwen3_5TextConfig, Qwen3VLTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm import modeling_glm
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.llama import modeling_llama
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_vl import modeling_qwen3_vl

from rtp_kernel.components import Binding, RotaryEmbedding
from rtp_kernel.ops.rotary import RopeParameters, rotary, rotary_angles
from rtp_kernel.registry import OpTable, default_registry

TABLES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1000000},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1e5,
        "factor": 16.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.25,
        "truncate": False,
    },
]


@pytest.mark.parametrize("parameters", TABLES, ids=lambda p: f"{p['rope_type']}-{len(p)}-{p['rope_theta']}")
@pytest.mark.parametrize("dim", [16, 64])
def test_tables_are_bit_equal_to_the_reference(parameters: dict[str, Any], dim: int) -> None:
    config = LlamaConfig(hidden_size=dim * 2, num_attention_heads=2, head_dim=dim, rope_parameters=dict(parameters))
    theirs = modeling_llama.LlamaRotaryEmbedding(config)
    inv_freq, factor = RopeParameters.from_dict(parameters).table(dim)
    assert torch.equal(inv_freq, theirs.inv_freq)
    assert factor == theirs.attention_scaling
    positions = torch.tensor([0, 1, 17, 4095])
    for dtype in (torch.float32, torch.bfloat16):
        want = theirs(torch.zeros(1, dtype=dtype), positions[None])
        got = rotary_angles(positions, inv_freq, factor, dtype)
        assert all(torch.equal(ours, other[0]) for ours, other in zip(got, want, strict=True))


def test_every_table_that_transformers_computes_once_is_known_or_refused_by_name() -> None:
    for name in ROPE_INIT_FUNCTIONS:
        if name not in ("linear", "llama3", "yarn"):
            with pytest.raises(
                ValueError, match=f'rope_type "{name}" is unknown; known: default, linear, llama3, yarn'
            ):
                RopeParameters(rope_type=name, theta=1.0)


def test_missing_numbers_are_named() -> None:
    with pytest.raises(ValueError, match="rope_theta"):
        RopeParameters.from_dict({"rope_type": "default"})
    with pytest.raises(ValueError, match="needs low_freq_factor, high_freq_factor, original_max"):
        RopeParameters.from_dict({"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0})


def test_flat_old_names_are_understood() -> None:
    assert RopeParameters.from_dict({"type": "linear", "rope_theta": 1e4, "factor": 2.0}).rope_type == "linear"


def _angles(dim: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    inv_freq, factor = RopeParameters(theta=1e4).table(dim)
    return rotary_angles(torch.arange(tokens) * 3, inv_freq, factor, torch.float32)


@pytest.mark.parametrize(
    ("layout", "module", "function", "rotary_dim"),
    [
        ("half", modeling_llama, "apply_rotary_pos_emb", 16),
        ("half", modeling_glm4_moe, "apply_rotary_pos_emb", 8),
        ("interleaved", modeling_glm, "apply_rotary_pos_emb", 16),
        ("interleaved", modeling_glm, "apply_rotary_pos_emb", 8),
        ("interleaved_to_half", modeling_deepseek_v3, "apply_rotary_pos_emb_interleave", 16),
    ],
)
def test_layouts_are_those_of_the_reference(layout: str, module: ModuleType, function: str, rotary_dim: int) -> None:
    q, k = torch.randn(9, 4, 16), torch.randn(9, 2, 16)
    cos, sin = _angles(rotary_dim, 9)
    want = getattr(module, function)(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
    got = rotary(q, k, cos, sin, layout)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.allclose(ours, theirs[0].transpose(0, 1), rtol=0, atol=1e-6)
    if layout == "half":
        assert torch.equal(got[0], want[0][0].transpose(0, 1))


def test_interleaved_is_the_complex_rotation_of_deepseek_v2() -> None:
    q, k = torch.randn(9, 4, 16), torch.randn(9, 1, 16)
    inv_freq = RopeParameters(theta=1e4).table(16)[0]
    angles = torch.outer(torch.arange(9) * 3.0, inv_freq)
    want = modeling_deepseek_v2.apply_rotary_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], torch.polar(torch.ones_like(angles), angles)[None]
    )
    got = rotary(q, k, *_angles(16, 9), "interleaved")
    for ours, theirs in zip(got, want, strict=True):
        assert torch.allclose(ours, theirs[0].transpose(0, 1), atol=1e-5)


MULTI_AXIS: dict[str, tuple[type[nn.Module], Any, list[int], int, float]] = {
    "sections": (modeling_qwen2_5_vl.Qwen2_5_VLRotaryEmbedding, Qwen2_5_VLTextConfig, [2, 3, 3], 16, 1.0),
    "sections that come again": (
        modeling_qwen2_5_vl.Qwen2_5_VLRotaryEmbedding, Qwen2_5_VLTextConfig, [1, 2, 3, 2, 4], 24, 1.0,
    ),
    "interleaved": (modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding, Qwen3VLTextConfig, [24, 20, 20], 128, 1.0),
    "more time": (modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding, Qwen3VLTextConfig, [9, 2, 3], 28, 1.0),
    "more height than there is": (modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding, Qwen3VLTextConfig, [0, 9, 1], 20, 1.0),
    "a part of the head": (modeling_qwen3_5.Qwen3_5TextRotaryEmbedding, Qwen3_5TextConfig, [3, 2, 2], 56, 0.25),
}  # fmt: skip


@pytest.mark.parametrize("case", MULTI_AXIS)
def test_positions_of_three_axes(case: str) -> None:
    module, config_class, section, head_dim, partial = MULTI_AXIS[case]
    parameters = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": section, "partial_rotary_factor": partial}
    config = config_class(
        hidden_size=head_dim * 2, num_attention_heads=2, head_dim=head_dim, rope_parameters=dict(parameters)
    )
    interleaved = "sections" not in case
    rope = RopeParameters.from_dict(parameters | {"mrope_interleaved": interleaved})
    ours = RotaryEmbedding(int(head_dim * partial), rope)
    positions = torch.stack([torch.arange(9) * 3, torch.arange(9) * 7 % 5, 40 - torch.arange(9)])
    want = module(config)(torch.zeros(1), positions[:, None])
    for got, theirs in zip(ours(positions), want, strict=True):
        assert got.shape == (9, int(head_dim * partial)) and torch.allclose(got, theirs[0], rtol=0, atol=1e-6)
    text = positions[:1].expand(3, -1)
    for got, alone in zip(ours(text), ours(positions[0]), strict=True):
        assert torch.equal(got, alone)


def test_the_old_type_of_three_axes() -> None:
    rope = RopeParameters.from_dict({"type": "mrope", "rope_theta": 1e4, "mrope_section": [1, 1, 2]})
    assert rope.rope_type == "default"
    axes = rope.axes(8)
    assert axes is not None and axes.tolist() == [0, 1, 2, 2]


def test_sections_must_fill_the_table_and_axes_be_declared() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\] must add up to 8"):
        RotaryEmbedding(16, RopeParameters(theta=1e4, mrope_section=(2, 3)))
    with pytest.raises(ValueError, match="positions of 3 axes need mrope_section"):
        RotaryEmbedding(16, RopeParameters(theta=1e4))(torch.zeros(3, 2, dtype=torch.int64))


@pytest.mark.parametrize("parameters", TABLES, ids=lambda p: f"{p['rope_type']}-{len(p)}-{p['rope_theta']}")
def test_softmax_factor_is_that_of_deepseek(parameters: dict[str, Any]) -> None:
    want = modeling_deepseek_v3.yarn_apply_mscale(parameters, 1.0)
    assert RopeParameters.from_dict(parameters).softmax_factor() == pytest.approx(want, rel=1e-15)


def test_tables_may_be_pinned_whatever_the_models_dtype() -> None:
    pinned = RotaryEmbedding(8, RopeParameters(theta=1e4), dtype=torch.float32)
    pinned.bind(Binding("rotary_emb", OpTable(default_registry(), device="cpu", dtype=torch.bfloat16),
                        torch.device("cpu"), torch.bfloat16))  # fmt: skip
    assert {table.dtype for table in pinned(torch.arange(3))} == {torch.float32}
