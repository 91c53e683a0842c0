"""DeepSeek-V3.2 against transformers. Many index heads: with few, relu makes scores of exactly 0, and ties of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rtp_runtime.testing.compare import check_plugin, check_tiny
from rtp_runtime.testing.tiny_models import write_tiny

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "eight tokens of many": {},
    "a single token": {"index_topk": 1},
    "more tokens than any prompt has": {"index_topk": 500},
    "yarn with mscale, biases, tied head": {
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "weights as they are, one group, one expert per token": {
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 1,
    },
    "a dense layer between routed ones": {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    "one dense layer": {"num_hidden_layers": 1},
    "one routed layer": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "odd sizes, three heads": {
        "vocab_size": 391,
        "hidden_size": 60,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 22,
        "kv_lora_rank": 19,
        "q_lora_rank": 21,
        "index_n_heads": 23,
        "index_head_dim": 15,
        "index_topk": 7,
        "n_routed_experts": 9,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 18,
    },
    "five heads, narrow values, index heads wholly turned": {
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "v_head_dim": 6,
        "index_n_heads": 24,
        "index_head_dim": 8,
        "rms_norm_eps": 1e-5,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(variant: str) -> None:
    check_tiny("deepseek_v32", **VARIANTS[variant])


@pytest.mark.parametrize("seed", [1, 2])
def test_matches_transformers_for_other_weights(seed: int) -> None:
    check_tiny("deepseek_v32", seed)


def test_stacked_experts_are_a_second_layout(write_stacked: Callable[[Any, Path], None], tmp_path: Path) -> None:
    write_stacked(write_tiny("deepseek_v32", tmp_path / "hub"), tmp_path / "stacked")
    check_plugin(tmp_path / "stacked")


def test_flat_configs_and_prediction_layers_load(write_as_on_the_hub: Callable[..., None], tmp_path: Path) -> None:
    write_tiny("deepseek_v32", tmp_path, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0})
    write_as_on_the_hub(tmp_path, scoring_func="sigmoid", topk_method="noaux_tc", num_nextn_predict_layers=1)
    check_plugin(tmp_path)
