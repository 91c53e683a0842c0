"""GLM-4-0414 against transformers."""

from __future__ import annotations

from typing import Any

import pytest

from rtp_runtime.testing.compare import check_tiny
from rtp_runtime.testing.tiny_models import rope

VARIANTS: dict[str, dict[str, Any]] = {
    "biases, half of each head turned": {},
    "no biases, tied head": {"attention_bias": False, "tie_word_embeddings": True},
    "a quarter of each head turned": {"rope_parameters": rope(5e5, partial_rotary_factor=0.25)},
    "whole heads turned": {"rope_parameters": rope(partial_rotary_factor=1.0)},
    "odd sizes": {
        "vocab_size": 391,
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 50,
    },
    "one layer, one group": {"num_hidden_layers": 1, "num_attention_heads": 5, "num_key_value_heads": 1},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(variant: str) -> None:
    check_tiny("glm4", **VARIANTS[variant])


@pytest.mark.parametrize("seed", [1, 2])
def test_matches_transformers_for_other_weights(seed: int) -> None:
    check_tiny("glm4", seed)
