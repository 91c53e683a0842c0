"""DeepSeek-V2 and V2-Lite against transformers."""

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

LITE = "deepseek_v2"
GROUPED = "deepseek_v2_grouped"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "full-rank queries, greedy routing, yarn": (LITE, {}),
    "low-rank queries, the best groups of experts": (GROUPED, {}),
    "one group, one expert per token": (GROUPED, {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}),
    "a group of one's own for every expert": (GROUPED, {"n_group": 8, "topk_group": 3}),
    "renormalisation is ignored, low-rank queries, yarn": (LITE, {"norm_topk_prob": True, "q_lora_rank": 20}),
    "biases, tied head": (GROUPED, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "full-rank queries with a bias elsewhere": (LITE, {"attention_bias": True, "rms_norm_eps": 1e-5}),
    "every layer routed, one shared expert, no yarn": (
        LITE,
        {"first_k_dense_replace": 0, "n_shared_experts": 1, "rope_parameters": rope(1e4)},
    ),
    "one dense layer": (LITE, {"num_hidden_layers": 1}),
    "one routed layer": (GROUPED, {"num_hidden_layers": 1, "first_k_dense_replace": 0}),
    "odd sizes, three heads": (
        LITE,
        {
            "vocab_size": 391,
            "hidden_size": 60,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 6,
            "v_head_dim": 22,
            "kv_lora_rank": 18,
            "n_routed_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 18,
        },
    ),
    "five heads, narrow values": (
        GROUPED,
        {
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "qk_nope_head_dim": 20,
            "v_head_dim": 6,
            "q_lora_rank": 13,
            "n_routed_experts": 12,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 5,
        },
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(variant: str) -> None:
    name, overrides = VARIANTS[variant]
    check_tiny(name, **overrides)


@pytest.mark.parametrize("name", [LITE, GROUPED])
def test_matches_transformers_for_other_weights(name: str) -> None:
    check_tiny(name, seed=1)


def test_stacked_experts_are_a_second_layout(write_stacked: Callable[[Any, Path], None], tmp_path: Path) -> None:
    write_stacked(write_tiny(LITE, tmp_path / "hub"), tmp_path / "stacked")
    check_plugin(tmp_path / "stacked")


@pytest.mark.parametrize("name", [LITE, GROUPED])
def test_flat_configs_load(write_as_on_the_hub: Callable[..., None], tmp_path: Path, name: str) -> None:
    write_tiny(name, tmp_path)
    write_as_on_the_hub(tmp_path, scoring_func="softmax", moe_layer_freq=1, aux_loss_alpha=0.001)
    check_plugin(tmp_path)


def test_other_routers_are_declined(tmp_path: Path) -> None:
    write_tiny(LITE, tmp_path, topk_method="noaux_tc")
    with pytest.raises(UnsupportedModelError, match='topk_method is "noaux_tc"'):
        load_model(tmp_path, dtype="float32", plugins=load_plugins())
