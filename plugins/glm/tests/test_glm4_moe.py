"""GLM-4.5 and its successors against transformers."""

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
    "a dense layer before routed ones": {},
    "no biases, no norms of q and k, tied head": {
        "attention_bias": False,
        "use_qk_norm": False,
        "tie_word_embeddings": True,
    },
    "two of four groups of experts": {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "every layer routed, weights as they are": {
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "two shared experts, a quarter of each head turned": {
        "n_shared_experts": 2,
        "rope_parameters": rope(1e4, partial_rotary_factor=0.25),
    },
    "whole heads turned": {"rope_parameters": rope(partial_rotary_factor=1.0)},
    "one dense layer": {"num_hidden_layers": 1},
    "one routed layer": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "odd sizes": {
        "vocab_size": 391,
        "hidden_size": 60,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 20,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 18,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(variant: str) -> None:
    check_tiny("glm4_moe", **VARIANTS[variant])


@pytest.mark.parametrize("seed", [1, 2])
def test_matches_transformers_for_other_weights(seed: int) -> None:
    check_tiny("glm4_moe", seed)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("scoring_func", "softmax", "only 'sigmoid' is computed"),
        ("n_group", 8, "groups must be even"),
        ("n_group", 3, "groups must be even"),
    ],
)
def test_other_routing_is_refused(tmp_path: Path, key: str, value: Any, reason: str) -> None:
    write_tiny("glm4_moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(RtpError, match=reason):
        load_model(tmp_path, dtype="float32", plugins=load_plugins())


def test_stacked_experts_are_a_second_layout(write_stacked: Callable[[Any, Path], None], tmp_path: Path) -> None:
    write_stacked(write_tiny("glm4_moe", tmp_path / "hub"), tmp_path / "stacked")
    check_plugin(tmp_path / "stacked")


def test_flat_configs_and_prediction_layers_load(write_as_on_the_hub: Callable[..., None], tmp_path: Path) -> None:
    write_tiny("glm4_moe", tmp_path)
    write_as_on_the_hub(tmp_path, layers=3)
    check_plugin(tmp_path)
