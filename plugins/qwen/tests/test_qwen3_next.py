"""Qwen3-Next against transformers: head counts, dims and kernels, layers of one kind, both expert forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_runtime.model import load_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.compare import check_plugin, check_tiny
from rtp_runtime.testing.tiny_models import rope, write_tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "three delta nets, one full, one dense": {},
    "odd sizes": {
        "vocab_size": 391,
        "hidden_size": 60,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 14,
        "linear_conv_kernel_dim": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "num_experts": 7,
        "num_experts_per_tok": 3,
    },
    "one key head, not renormalised": {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 5,
        "linear_conv_kernel_dim": 2,
        "norm_topk_prob": False,
        "attention_bias": True,
    },
    "one delta net": {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "mlp_only_layers": []},
    "one full layer, whole heads turned": {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "rope_parameters": rope(1e4, partial_rotary_factor=1.0),
        "tie_word_embeddings": True,
    },
    "delta nets around, every second layer sparse": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "mlp_only_layers": [],
        "decoder_sparse_step": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
    },
    "all dense": {"mlp_only_layers": [0, 1, 2, 3], "hidden_act": "gelu"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(variant: str) -> None:
    check_tiny("qwen3_next", **VARIANTS[variant])


def test_stacked_experts_load_to_the_same_parameters(tmp_path: Path) -> None:
    hub, fused = tmp_path / "hub", tmp_path / "fused"
    reference = write_tiny("qwen3_next", hub)
    fused.mkdir()
    (fused / "config.json").write_text((hub / "config.json").read_text())
    tensors = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    save_file(tensors, fused / "model.safetensors", metadata={"format": "pt"})
    plugins = load_plugins()
    first = load_model(hub, dtype="float32", plugins=plugins).module.state_dict()
    second = load_model(fused, dtype="float32", plugins=plugins).module.state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in tensors and first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_multi_token_prediction_is_left_out(tmp_path: Path) -> None:
    write_tiny("qwen3_next", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"mtp.fc.weight": torch.zeros(64, 128), "mtp.layers.0.mlp.gate.weight": torch.zeros(8, 64)}
    save_file(tensors | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_plugin(tmp_path)
