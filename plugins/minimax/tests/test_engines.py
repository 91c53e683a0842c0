"""MiniMax in the engine: bit-equal where that is asked for, prefixes reused, as exact in bfloat16 as the reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from rtp_runtime.testing.engines import assert_bfloat16_is_as_near, assert_deterministic, assert_reuse_changes_nothing
from rtp_runtime.testing.tiny_models import write_tiny


@pytest.mark.parametrize(
    ("name", "dtype"), [("minimax", "float32"), ("minimax_m2", "bfloat16"), ("minimax_m3", "bfloat16")]
)
def test_deterministic_logits_are_bit_equal_in_every_mode(name: str, dtype: str, tmp_path: Path) -> None:
    write_tiny(name, tmp_path)
    assert_deterministic(tmp_path, dtype)


@pytest.mark.parametrize("name", ["minimax", "minimax_m3_vl"])
def test_a_reused_prefix_changes_nothing(name: str, tmp_path: Path) -> None:
    """Requests that begin alike start from a copy of the states, the blocks of keys and those of index keys."""
    write_tiny(name, tmp_path)
    assert_reuse_changes_nothing(tmp_path)


@pytest.mark.parametrize("name", ["minimax", "minimax_m2", "minimax_m3"])
def test_bfloat16_is_as_near_to_float32_as_the_reference(name: str, tmp_path: Path) -> None:
    """On a prompt that all blocks of M3 are chosen for: rounding would choose others."""
    sizes = {"index_topk_blocks": 64} if name == "minimax_m3" else {}
    model = write_tiny(name, tmp_path, **sizes)
    model.set_experts_implementation("eager")
    assert_bfloat16_is_as_near(model, tmp_path)
