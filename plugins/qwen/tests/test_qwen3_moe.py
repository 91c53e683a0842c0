"""Qwen3-MoE against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rtp_runtime.testing.tiny_models import write_tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "a dense layer between routed ones": {},
    "all layers routed, weights as they are": {"mlp_only_layers": [], "norm_topk_prob": False},
    "biases, tied head": {"attention_bias": True, "tie_word_embeddings": True},
    "a window on every layer": {"use_sliding_window": True, "sliding_window": 24},
    "odd sizes": {"vocab_size": 391, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 18},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(assert_matches_reference: Callable[..., None], variant: str) -> None:
    assert_matches_reference("qwen3_moe", **VARIANTS[variant])


def test_export_returns_every_tensor(assert_exports_what_it_loaded: Callable[[Path], None], tmp_path: Path) -> None:
    write_tiny("qwen3_moe", tmp_path / "checkpoint")
    assert_exports_what_it_loaded(tmp_path / "checkpoint")
