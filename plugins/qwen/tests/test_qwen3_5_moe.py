"""Qwen3.5's sparse models against transformers: per-expert and stacked tensors, text class and wrapper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rtp_runtime.model import load_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.compare import check_tiny
from rtp_runtime.testing.tiny_models import write_tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "three delta nets, one full": {},
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
        "moe_intermediate_size": 18,
        "shared_expert_intermediate_size": 22,
    },
    "one expert per token, tied head": {"num_experts_per_tok": 1, "tie_word_embeddings": True},
    "one delta net": {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "linear_num_key_heads": 4},
    "one full layer": {"num_hidden_layers": 1, "layer_types": ["full_attention"], "attention_bias": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(variant: str) -> None:
    check_tiny("qwen3_5_moe", **VARIANTS[variant])


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_every_form_loads_to_the_same_parameters(prefix: str, tmp_path: Path) -> None:
    """Stacked experts, under the text class's names and (as on the hub) the wrapper's."""
    hub, other = tmp_path / "hub", tmp_path / "other"
    reference = write_tiny("qwen3_5_moe", hub)
    other.mkdir()
    text = json.loads((hub / "config.json").read_text())
    wrapper = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
    }
    (other / "config.json").write_text(json.dumps(wrapper if "language" in prefix else text))
    tensors = {
        name.replace("model.", prefix, 1): tensor.contiguous() for name, tensor in reference.state_dict().items()
    }
    tensors["model.visual.pos_embed.weight"] = torch.zeros(4, 4)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    plugins = load_plugins()
    first = load_model(hub, dtype="float32", plugins=plugins).module.state_dict()
    second = load_model(other, dtype="float32", plugins=plugins).module.state_dict()
    assert f"{prefix}layers.0.mlp.experts.gate_up_proj" in tensors and first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
