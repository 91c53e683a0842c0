"""GLM-4.7-Flash against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rtp_runtime.testing.compare import check_plugin, check_tiny
from rtp_runtime.testing.tiny_models import rope, write_tiny

STRETCHED: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "a dense layer before routed ones": {},
    "queries without a low rank, biases, tied head": {
        "q_lora_rank": None,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "biases": {"attention_bias": True},
    "heads turned in halves": {"rope_interleave": False},
    "stretched positions": {"rope_parameters": rope(mscale=0.7, mscale_all_dim=0.7, **STRETCHED)},
    "stretched positions, magnitude in the angles": {"rope_parameters": rope(**STRETCHED)},
    "two of four groups of experts": {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "routed before dense": {"mlp_layer_types": ["sparse", "dense", "sparse"], "n_shared_experts": 2},
    "one dense layer": {"num_hidden_layers": 1, "mlp_layer_types": ["dense"]},
    "one routed layer, weights as they are": {
        "num_hidden_layers": 1,
        "mlp_layer_types": ["sparse"],
        "norm_topk_prob": False,
    },
    "odd sizes": {
        "vocab_size": 391,
        "hidden_size": 60,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "q_lora_rank": 22,
        "kv_lora_rank": 30,
        "qk_nope_head_dim": 14,
        "qk_rope_head_dim": 6,
        "v_head_dim": 18,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 18,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(variant: str) -> None:
    check_tiny("glm4_moe_lite", **VARIANTS[variant])


@pytest.mark.parametrize("seed", [1, 2])
def test_matches_transformers_for_other_weights(seed: int) -> None:
    check_tiny("glm4_moe_lite", seed)


def test_stacked_experts_are_a_second_layout(write_stacked: Callable[[Any, Path], None], tmp_path: Path) -> None:
    write_stacked(write_tiny("glm4_moe_lite", tmp_path / "hub"), tmp_path / "stacked")
    check_plugin(tmp_path / "stacked")


def test_flat_configs_and_prediction_layers_load(write_as_on_the_hub: Callable[..., None], tmp_path: Path) -> None:
    write_tiny("glm4_moe_lite", tmp_path)
    write_as_on_the_hub(tmp_path, layers=3)
    check_plugin(tmp_path)
