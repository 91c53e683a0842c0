"""Qwen2 against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rtp_runtime.testing.tiny_models import rope, write_tiny

VARIANTS = {
    "full and sliding layers, tied head": {},
    "no window, own head": {"use_sliding_window": False, "tie_word_embeddings": False},
    "odd sizes": {
        "vocab_size": 391,
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "intermediate_size": 50,
    },
    "one layer, every head its own group": {"num_hidden_layers": 1, "num_key_value_heads": 4, "max_window_layers": 0},
    "yarn": {
        "rope_parameters": rope(1e6)
        | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(assert_matches_reference: Callable[..., None], variant: str) -> None:
    assert_matches_reference("qwen2", **VARIANTS[variant])


@pytest.mark.parametrize("seed", [1, 2])
def test_matches_transformers_for_other_weights(assert_matches_reference: Callable[..., None], seed: int) -> None:
    assert_matches_reference("qwen2", seed)


def test_export_returns_every_tensor(assert_exports_what_it_loaded: Callable[[Path], None], tmp_path: Path) -> None:
    write_tiny("qwen2", tmp_path / "checkpoint")
    assert_exports_what_it_loaded(tmp_path / "checkpoint")
