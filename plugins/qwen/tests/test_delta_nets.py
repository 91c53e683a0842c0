"""Delta nets in the engine: bit-equal where that is asked for, large states in place, prefixes reused, bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rtp_runtime.model import load_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.compare import check_tiny
from rtp_runtime.testing.engines import assert_bfloat16_is_as_near, assert_deterministic, assert_reuse_changes_nothing
from rtp_runtime.testing.tiny_models import write_tiny


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen3_next", "float32"), ("qwen3_5", "bfloat16"), ("qwen4_exp", "float32"), ("qwen4_exp", "bfloat16")],
)
def test_deterministic_logits_are_bit_equal_in_every_mode(name: str, dtype: str, tmp_path: Path) -> None:
    write_tiny(name, tmp_path, linear_num_key_heads=1, linear_num_value_heads=3)
    assert_deterministic(tmp_path, dtype)


def test_large_states_are_updated_in_place(tmp_path: Path) -> None:
    sizes = {"linear_key_head_dim": 96, "linear_value_head_dim": 90, "num_hidden_layers": 2}
    overrides: dict[str, Any] = {**sizes, "layer_types": ["linear_attention", "full_attention"]}
    write_tiny("qwen3_5", tmp_path, **overrides)
    choices = load_model(tmp_path, dtype="float32", plugins=load_plugins()).ops.choices
    assert "cpu_in_place" in {choice.implementation for choice in choices if choice.op == "gated_delta_rule"}
    check_tiny("qwen3_5", **overrides)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe", "qwen4_exp"])
def test_a_reused_prefix_changes_nothing(name: str, tmp_path: Path) -> None:
    """Requests that begin alike start from a snapshot of both states and the blocks of the full layer."""
    write_tiny(name, tmp_path)
    assert_reuse_changes_nothing(tmp_path)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen4_exp"])
def test_bfloat16_is_as_near_to_float32_as_the_reference(name: str, tmp_path: Path) -> None:
    assert_bfloat16_is_as_near(write_tiny(name, tmp_path), tmp_path)
