"""Qwen3.5 against transformers: the text class and the wrapper, each from its own and from the other's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_kernel.components import RotaryEmbedding
from rtp_runtime.model import load_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.compare import check_plugin, check_tiny
from rtp_runtime.testing.tiny_models import rope, write_tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "three delta nets, one full": {},
    "odd sizes": {
        "vocab_size": 391,
        "hidden_size": 60,
        "intermediate_size": 50,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 14,
        "linear_conv_kernel_dim": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
    },
    "five value heads of one key head, tied head": {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 5,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
    "one delta net": {"num_hidden_layers": 1, "layer_types": ["linear_attention"]},
    "one full layer, whole heads turned": {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "rope_parameters": rope(1e4, partial_rotary_factor=1.0, mrope_section=[6, 5, 5], mrope_interleaved=True),
    },
    "full layers only": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(variant: str) -> None:
    check_tiny("qwen3_5", **VARIANTS[variant])


@pytest.mark.parametrize("variant", ["three delta nets, one full", "odd sizes"])
def test_wrapper_matches_transformers(variant: str) -> None:
    check_tiny("qwen3_5_vl", **VARIANTS[variant])


def _rename(directory: Path, old: str, new: str) -> None:
    tensors = load_file(directory / "model.safetensors")
    moved = {name.replace(old, new, 1) if name.startswith(old) else name: each for name, each in tensors.items()}
    save_file(moved, directory / "model.safetensors", metadata={"format": "pt"})


def test_text_class_from_the_names_of_the_wrapper(tmp_path: Path) -> None:
    """As transformers' own text class loads them, vision tower, multi-token prediction and all."""
    write_tiny("qwen3_5_vl", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"] | {"architectures": ["Qwen3_5ForCausalLM"], "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(text))
    tensors = load_file(tmp_path / "model.safetensors") | {"mtp.fc.weight": torch.zeros(64, 128)}
    assert any(name.startswith("model.visual.") for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_plugin(tmp_path)


def test_wrapper_from_the_names_of_the_text_class(tmp_path: Path) -> None:
    write_tiny("qwen3_5_vl", tmp_path)
    plugins = load_plugins()
    first = load_model(tmp_path, dtype="float32", plugins=plugins).module.state_dict()
    _rename(tmp_path, "model.language_model.", "model.")
    second = load_model(tmp_path, dtype="float32", plugins=plugins).module.state_dict()
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_positions_of_three_axes(tmp_path: Path) -> None:
    """The angles of an image's tokens, whose time, height and width differ."""
    model = write_tiny("qwen3_5_vl", tmp_path)
    rotary = load_model(tmp_path, dtype="float32", plugins=load_plugins()).module.get_submodule("model.rotary_emb")
    assert isinstance(rotary, RotaryEmbedding)
    positions = torch.stack([torch.full((9,), 4), torch.arange(9) // 3 + 4, torch.arange(9) % 3 + 4])
    wanted = model.model.language_model.rotary_emb(torch.zeros(1), positions[:, None])
    for ours, theirs in zip(rotary(positions), wanted, strict=True):
        assert torch.allclose(ours, theirs[0], rtol=0, atol=1e-6)
