"""Qwen3-VL's language model against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rtp_runtime import LLM
from rtp_runtime.model import load_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.compare import check_plugin, check_tiny, logits_error
from rtp_runtime.testing.tiny_models import rope, write_tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "three layers": {},
    "biases": {"attention_bias": True, "rope_parameters": rope(1e6, mrope_section=[6, 5, 5], mrope_interleaved=True)},
    "odd sizes": {
        "vocab_size": 391,
        "hidden_size": 60,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 14,
        "intermediate_size": 50,
        "rope_parameters": rope(1e4, mrope_section=[3, 2, 2], mrope_interleaved=True),
    },
    "one layer, one group of three heads, no sections": {
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rope_parameters": rope(1e6),
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(variant: str) -> None:
    check_tiny("qwen3_vl", **VARIANTS[variant])


@pytest.mark.parametrize("where", ["wrapper", "text part", "both"])
def test_tied_head(where: str, tmp_path: Path) -> None:
    """The checkpoint of a tied head holds the embedding alone."""
    reference = write_tiny("qwen3_vl", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    if where != "text part":
        config["tie_word_embeddings"] = True
    if where != "wrapper":
        config["text_config"]["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if where != "text part":  # transformers reads the wrapper's word alone
        check_plugin(tmp_path)
    reference.lm_head.weight = reference.model.language_model.embed_tokens.weight
    with LLM(tmp_path, dtype="float32", num_blocks=16, max_num_seqs=2) as llm:
        assert logits_error(llm, reference, [5, 7, 300, 11]) < 2e-5


def test_config_of_the_hub(tmp_path: Path) -> None:
    """Theta beside the sections in the text part, as files older than `rope_parameters` have it."""
    write_tiny("qwen3_vl", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    numbers = config["text_config"].pop("rope_parameters")
    config["text_config"] |= {"rope_theta": numbers.pop("rope_theta"), "rope_scaling": numbers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_plugin(tmp_path)
    unread = load_model(tmp_path, dtype="float32", plugins=load_plugins()).config.unread_keys()
    assert not [key for key in unread if "rope" in key and not key.startswith("vision")]


def test_positions_of_three_axes(assert_axes_agree: Callable[..., None]) -> None:
    assert_axes_agree("qwen3_vl")
