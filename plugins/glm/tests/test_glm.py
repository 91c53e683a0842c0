"""GLM-4-9B against transformers."""

from __future__ import annotations

from typing import Any

import pytest

from rtp_runtime.testing.compare import check_tiny
from rtp_runtime.testing.tiny_models import rope

VARIANTS: dict[str, dict[str, Any]] = {
    "biases, half of each head turned": {},
    "no biases, tied head": {"attention_bias": False, "tie_word_embeddings": True},
    "a quarter of each head turned": {"rope_parameters": rope(partial_rotary_factor=0.25)},
    "whole heads turned": {"rope_parameters": rope(partial_rotary_factor=1.0)},
    "stretched positions": {"rope_parameters": rope(rope_type="linear", factor=4.0, partial_rotary_factor=0.5)},
    "odd sizes": {
        "vocab_size": 391,
        "hidden_size": 60,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "intermediate_size": 50,
    },
    "one layer, every head its own group": {
        "num_hidden_layers": 1,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 12,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(variant: str) -> None:
    check_tiny("glm", **VARIANTS[variant])


@pytest.mark.parametrize("seed", [1, 2])
def test_matches_transformers_for_other_weights(seed: int) -> None:
    check_tiny("glm", seed)
