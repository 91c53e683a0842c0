"""MiniMax-M2 against transformers, from released tensors and from stacked ones, and which configs it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_runtime.errors import UnsupportedModelError
from rtp_runtime.model import load_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.compare import check_plugin, check_tiny
from rtp_runtime.testing.tiny_models import rope, write_tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "half of each head rotated": {},
    "whole heads rotated, tied head": {"rope_parameters": rope(1e4), "tie_word_embeddings": True},
    "three heads of one group, odd sizes": {
        "vocab_size": 391,
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "intermediate_size": 18,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
    },
    "five heads, each its own group": {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 12},
    "one layer, all experts": {"num_hidden_layers": 1, "num_local_experts": 3, "num_experts_per_tok": 3},
    "another activation and eps": {"hidden_act": "gelu", "rms_norm_eps": 1e-2},
    "yarn": {
        "rope_parameters": rope(1e6, partial_rotary_factor=0.5)
        | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(variant: str) -> None:
    check_tiny("minimax_m2", **VARIANTS[variant])


@pytest.mark.parametrize("seed", [1, 2])
def test_matches_transformers_for_other_weights(seed: int) -> None:
    check_tiny("minimax_m2", seed)


def rewrite_config(directory: Path, **values: Any) -> None:
    """Change keys of the checkpoint's config; None removes one."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


RELEASED = {"attn_type_list": [1, 1, 1], "qk_norm_type": "per_layer", "scoring_func": "sigmoid"}
RELEASED |= {"use_qk_norm": True, "use_routing_bias": True, "use_mtp": True, "num_mtp_modules": 3}
RELEASED |= {"shared_intermediate_size": 0, "mtp_transformer_layers": 1}


def test_takes_the_keys_of_released_configs(tmp_path: Path) -> None:
    """Flat theta, a rotary_dim in place of the factor, and switches that the reference does not read."""
    write_tiny("minimax_m2", tmp_path)
    rewrite_config(tmp_path, rope_parameters=None, rope_theta=5000000, rotary_dim=16, **RELEASED)
    check_plugin(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_type_list", [1, 0, 1]),
        ("qk_norm_type", "per_head"),
        ("scoring_func", "softmax"),
        ("use_qk_norm", False),
        ("use_routing_bias", False),
        ("shared_intermediate_size", 32),
    ],
)
def test_declines_what_the_reference_would_overlook(tmp_path: Path, key: str, value: Any) -> None:
    write_tiny("minimax_m2", tmp_path)
    rewrite_config(tmp_path, **{key: value})
    with pytest.raises(UnsupportedModelError, match=key):
        load_model(tmp_path, dtype="float32", plugins=load_plugins())


def test_stacked_experts_load_to_the_same_parameters(tmp_path: Path) -> None:
    """The form that transformers holds in memory is a second layout of the same parameters."""
    hub, fused = tmp_path / "hub", tmp_path / "fused"
    reference = write_tiny("minimax_m2", hub)
    fused.mkdir()
    (fused / "config.json").write_text((hub / "config.json").read_text())
    state = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    assert "model.layers.0.mlp.e_score_correction_bias" in state
    save_file(state, fused / "model.safetensors")

    plugins = load_plugins()
    first = load_model(hub, dtype="float32", plugins=plugins).module.state_dict()
    second = load_model(fused, dtype="float32", plugins=plugins).module.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_leaves_out_layers_of_multi_token_prediction(tmp_path: Path) -> None:
    write_tiny("minimax_m2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.3.enorm.weight": torch.ones(64), "model.layers.12.eh_proj.weight": torch.ones(64, 128)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    skipped = load_model(tmp_path, dtype="float32", plugins=load_plugins()).weights.audit.skipped
    assert set(skipped) == set(extra) and all("multi-token" in reason for reason in skipped.values())
