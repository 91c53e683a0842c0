"""Qwen2.5-VL's language model against transformers, from every form in which its checkpoints exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rtp_kernel.components import RotaryEmbedding
from rtp_runtime.model import load_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.compare import check_plugin, check_tiny
from rtp_runtime.testing.tiny_models import rope, write_tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "three layers": {},
    "sliding layers": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "odd sizes": {
        "vocab_size": 391,
        "hidden_size": 60,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 50,
        "rope_parameters": rope(1e4, mrope_section=[1, 3, 1]),
    },
    "one layer, one group of three heads": {
        "num_hidden_layers": 1,
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rope_parameters": rope(1e6, mrope_section=[1, 2, 3]),
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(variant: str) -> None:
    check_tiny("qwen2_5_vl", **VARIANTS[variant])


def _flatten(directory: Path) -> None:
    """As the hub's config.json: the text model's keys at the top, sections under the type "mrope"."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    numbers = text.pop("rope_parameters")
    text |= {"rope_theta": numbers["rope_theta"], "model_type": "qwen2_5_vl"}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": numbers["mrope_section"]}
    del text["layer_types"]
    file.write_text(json.dumps(text | config))


def test_flat_config_of_the_hub(tmp_path: Path) -> None:
    write_tiny("qwen2_5_vl", tmp_path)
    _flatten(tmp_path)
    check_plugin(tmp_path)
    loaded = load_model(tmp_path, dtype="float32", plugins=load_plugins())
    rotary = loaded.module.get_submodule("model.rotary_emb")
    assert isinstance(rotary, RotaryEmbedding) and rotary.rope.mrope_section == (2, 3, 3)
    assert not {"hidden_size", "rope_theta", "rope_scaling.mrope_section"} & set(loaded.config.unread_keys())


@pytest.mark.parametrize("flat", [True, False])
def test_tied_head_as_the_wrapper_says(flat: bool, tmp_path: Path) -> None:
    """The checkpoint of a tied head holds the embedding alone."""
    write_tiny("qwen2_5_vl", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if flat:
        _flatten(tmp_path)
    check_plugin(tmp_path)


def test_names_that_transformers_has_in_memory(tmp_path: Path) -> None:
    model = write_tiny("qwen2_5_vl", tmp_path)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert "model.language_model.norm.weight" in tensors and any(name.startswith("model.visual.") for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_plugin(tmp_path)


def test_positions_of_three_axes(assert_axes_agree: Callable[..., None]) -> None:
    assert_axes_agree("qwen2_5_vl")
