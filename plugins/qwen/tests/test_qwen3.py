"""Qwen3 against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rtp_runtime.testing.tiny_models import write_tiny

VARIANTS = {
    "head dim of its own, tied head": {},
    "biases, own head": {"attention_bias": True, "tie_word_embeddings": False},
    "sliding layers": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "odd sizes": {
        "vocab_size": 391,
        "hidden_size": 60,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 14,
        "intermediate_size": 50,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(assert_matches_reference: Callable[..., None], variant: str) -> None:
    assert_matches_reference("qwen3", **VARIANTS[variant])


def test_export_returns_every_tensor(assert_exports_what_it_loaded: Callable[[Path], None], tmp_path: Path) -> None:
    write_tiny("qwen3", tmp_path / "checkpoint")
    assert_exports_what_it_loaded(tmp_path / "checkpoint")
