"""DeepSeek-V3 against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rtp_runtime.errors import UnsupportedModelError
from rtp_runtime.model import load_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.compare import check_plugin, check_tiny
from rtp_runtime.testing.tiny_models import rope, write_tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped experts, yarn with mscale": {},
    "yarn whose two mscales differ": {
        "rope_parameters": rope(1e4)
        | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
        | {"mscale": 1.0, "mscale_all_dim": 0.5},
    },
    "full-rank queries, turned in halves": {"q_lora_rank": None, "rope_interleave": False},
    "biases, tied head": {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": rope(1e6)},
    "weights as they are, two shared experts": {
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 2,
    },
    "one group, one expert per token": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 1},
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
        "n_routed_experts": 9,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 18,
    },
    "five heads, narrow values, every layer routed": {
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "v_head_dim": 6,
        "first_k_dense_replace": 0,
        "rms_norm_eps": 1e-5,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(variant: str) -> None:
    check_tiny("deepseek_v3", **VARIANTS[variant])


@pytest.mark.parametrize("seed", [1, 2])
def test_matches_transformers_for_other_weights(seed: int) -> None:
    check_tiny("deepseek_v3", seed)


def test_stacked_experts_are_a_second_layout(write_stacked: Callable[[Any, Path], None], tmp_path: Path) -> None:
    write_stacked(write_tiny("deepseek_v3", tmp_path / "hub"), tmp_path / "stacked")
    check_plugin(tmp_path / "stacked")


def test_flat_configs_and_prediction_layers_load(write_as_on_the_hub: Callable[..., None], tmp_path: Path) -> None:
    write_tiny("deepseek_v3", tmp_path)
    write_as_on_the_hub(tmp_path, scoring_func="sigmoid", topk_method="noaux_tc", num_nextn_predict_layers=1, ep_size=1)
    check_plugin(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"scoring_func": "softmax"}, 'scoring_func is "softmax"'),
        ({"topk_method": "greedy"}, 'topk_method is "greedy"'),
        ({"topk_group": 1, "num_experts_per_tok": 3}, "topk_group = 1 groups hold 2 experts"),
    ],
)
def test_other_routers_are_declined(tmp_path: Path, overrides: dict[str, Any], reason: str) -> None:
    write_tiny("deepseek_v3", tmp_path, **overrides)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(tmp_path, dtype="float32", plugins=load_plugins())
