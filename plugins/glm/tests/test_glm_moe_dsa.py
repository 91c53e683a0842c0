"""GLM-5 and its successors against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rtp_runtime.errors import RtpError
from rtp_runtime.model import load_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.compare import check_plugin, check_tiny
from rtp_runtime.testing.tiny_models import rope, write_tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "every second layer shares a selection": {},
    "every layer selects": {"indexer_types": ["full"] * 4},
    "one selection for all layers": {"indexer_types": ["full", "shared", "shared", "shared"]},
    "shared by a pattern": {"indexer_types": None, "index_topk_pattern": "FFSS"},
    "shared by a period": {"indexer_types": None, "index_topk_freq": 3, "index_skip_topk_offset": 2},
    "one token selected": {"index_topk": 1},
    "more selected than there are": {"index_topk": 200},
    "biases, tied head": {"attention_bias": True, "tie_word_embeddings": True},
    "two of four groups of experts": {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "stretched positions": {
        "rope_parameters": rope(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0
        )
    },
    "one dense layer": {"num_hidden_layers": 1, "indexer_types": ["full"]},
    "one routed layer": {"num_hidden_layers": 1, "indexer_types": ["full"], "first_k_dense_replace": 0},
    "odd sizes": {
        "vocab_size": 391,
        "hidden_size": 60,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 22,
        "kv_lora_rank": 30,
        "qk_nope_head_dim": 14,
        "qk_rope_head_dim": 6,
        "v_head_dim": 18,
        "index_n_heads": 15,
        "index_head_dim": 14,
        "index_topk": 7,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 18,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(variant: str) -> None:
    check_tiny("glm_moe_dsa", **VARIANTS[variant])


@pytest.mark.parametrize("seed", [1, 2])
def test_matches_transformers_for_other_weights(seed: int) -> None:
    check_tiny("glm_moe_dsa", seed)


def test_stacked_experts_are_a_second_layout(write_stacked: Callable[[Any, Path], None], tmp_path: Path) -> None:
    write_stacked(write_tiny("glm_moe_dsa", tmp_path / "hub"), tmp_path / "stacked")
    check_plugin(tmp_path / "stacked")


def test_flat_configs_and_prediction_layers_load(write_as_on_the_hub: Callable[..., None], tmp_path: Path) -> None:
    write_tiny("glm_moe_dsa", tmp_path)
    write_as_on_the_hub(tmp_path, layers=4)
    check_plugin(tmp_path)


def test_a_first_layer_without_an_indexer_is_refused(tmp_path: Path) -> None:
    write_tiny("glm_moe_dsa", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["indexer_types"][0] = "shared"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RtpError, match="there is none before it"):
        load_model(tmp_path, dtype="float32", plugins=load_plugins())
