"""Qwen2-MoE against transformers, from per-expert and from stacked tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_runtime.model import load_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.tiny_models import write_tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "a dense layer between routed ones": {},
    "all layers routed, renormalised weights": {"mlp_only_layers": [], "norm_topk_prob": True},
    "every second layer routed, no q/k/v bias": {"mlp_only_layers": [], "decoder_sparse_step": 2, "qkv_bias": False},
    "sliding layers": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "odd sizes": {"vocab_size": 391, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 18},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(assert_matches_reference: Callable[..., None], variant: str) -> None:
    assert_matches_reference("qwen2_moe", **VARIANTS[variant])


def test_export_returns_every_tensor(assert_exports_what_it_loaded: Callable[[Path], None], tmp_path: Path) -> None:
    write_tiny("qwen2_moe", tmp_path / "checkpoint")
    assert_exports_what_it_loaded(tmp_path / "checkpoint")


def test_stacked_experts_load_to_the_same_parameters(
    assert_exports_what_it_loaded: Callable[[Path], None], tmp_path: Path
) -> None:
    """The form that transformers holds in memory is a second layout of the same parameters."""
    hub, fused = tmp_path / "hub", tmp_path / "fused"
    reference = write_tiny("qwen2_moe", hub)
    fused.mkdir()
    (fused / "config.json").write_text((hub / "config.json").read_text())
    save_file(
        {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}, fused / "model.safetensors"
    )
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(fused / "model.safetensors")

    plugins = load_plugins()
    first = load_model(hub, dtype="float32", plugins=plugins).module.state_dict()
    second = load_model(fused, dtype="float32", plugins=plugins).module.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert_exports_what_it_loaded(fused)
