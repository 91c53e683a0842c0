"""Qwen4-Exp against transformers, from every form in which its checkpoints exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.qwen4_exp import modeling_qwen4_exp
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpConfig

from rtp_runtime import RtpError
from rtp_runtime.model import load_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.compare import check_plugin, check_tiny
from rtp_runtime.testing.tiny_models import randomise, rope, tiny_config, write_tiny

LINEAR, INDEXED = "linear_attention", "indexed_attention"
VARIANTS: dict[str, dict[str, Any]] = {
    "n-grams on one layer": {},
    "no n-grams, four streams": {"ple_layer_ids": [], "hc_count": 4, "output_gate_type": "sigmoid"},
    "n-grams on two layers, tied head, biases": {
        "ple_layer_ids": [1, 3],
        "tie_word_embeddings": True,
        "attention_bias": True,
        "norm_topk_prob": False,
    },
    "pairs and fours of tokens, uneven shards": {
        "ngram_size": 4,
        "heads_per_ngram": 1,
        "ple_embed_dim": 36,
        "ple_conv_kernel_size": 3,
        "split_ngram_parts": 5,
        "make_ngram_vocab_size_divisible_by": 7,
    },
    "pairs of tokens": {"ngram_size": 2, "heads_per_ngram": 3, "ple_embed_dim": 33, "eos_token_id": [5, 2]},
    "blocks of two, a budget beyond the prompt": {"indexer_compress_ratio": 2, "indexer_budget": 400},
    "blocks of three, one at a time": {"indexer_compress_ratio": 3, "indexer_budget": 3},
    "odd sizes": {
        "vocab_size": 391,
        "hidden_size": 60,
        "head_dim": 20,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 9,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 14,
        "linear_conv_kernel_dim": 3,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 18,
        "hc_count": 3,
        "hc_lowrank": 5,
        "indexer_n_heads": 17,
        "indexer_head_dim": 22,
        "rope_parameters": rope(1e4, mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.5),
    },
    "one delta net": {"num_hidden_layers": 1, "layer_types": [LINEAR], "ple_layer_ids": [1]},
    "one indexed layer": {"num_hidden_layers": 1, "layer_types": [INDEXED], "ple_layer_ids": []},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(variant: str) -> None:
    check_tiny("qwen4_exp", **VARIANTS[variant])


def test_an_indexer_is_needed(tmp_path: Path) -> None:
    config = tiny_config("qwen4_exp").to_dict() | {"architectures": ["Qwen4ExpForCausalLM"]}
    sizes = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
    (tmp_path / "config.json").write_text(json.dumps(config | dict.fromkeys(sizes)))
    with pytest.raises(RtpError, match=r"indexer_n_heads, .*indexer_compress_ratio missing: indexed_attention"):
        load_model(tmp_path, dtype="float32", plugins=load_plugins())


def _topk_to_the_lower_place(self: Tensor, k: int, dim: int = -1, **options: Any) -> SimpleNamespace:
    values, indices = torch.sort(self, dim=dim, descending=True, stable=True)
    return SimpleNamespace(values=values.narrow(dim, 0, k), indices=indices.narrow(dim, 0, k))


@pytest.mark.parametrize("heads", [1, 2])
def test_few_index_heads(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then many scores are 0 and tie, which the reference leaves to torch; here it takes the earlier block too."""
    monkeypatch.setattr(Tensor, "topk", _topk_to_the_lower_place)
    check_tiny("qwen4_exp", indexer_n_heads=heads)


@pytest.mark.parametrize("ratio", [2, 4])
def test_positions_of_three_axes(assert_axes_agree: Callable[..., None], ratio: int) -> None:
    """An index key turns by the position of its block's first token, which may come in an earlier chunk."""
    assert_axes_agree("qwen4_exp", indexer_compress_ratio=ratio)


def _write_in_memory(model: Any, directory: Path) -> None:
    """The checkpoint again under the names that transformers holds: stacked experts, the n-gram table in one piece."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("layers.1.ple.ple_embedding.ngram_embedding.weight") for name in tensors)
    assert any(name.endswith("layers.0.mlp.experts.gate_up_proj") for name in tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _parameters(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_model(directory, dtype="float32", plugins=load_plugins()).module.state_dict()
    return found


def _assert_both_forms_load_alike(model: Any, directory: Path) -> None:
    hub = _parameters(directory)
    _write_in_memory(model, directory)
    in_memory = _parameters(directory)
    assert hub.keys() == in_memory.keys() and all(torch.equal(hub[name], in_memory[name]) for name in hub)


def test_names_that_transformers_has_in_memory(tmp_path: Path) -> None:
    _assert_both_forms_load_alike(write_tiny("qwen4_exp", tmp_path), tmp_path)


def test_language_model_of_the_vision_language_checkpoint(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"patch_size": 4, "num_position_embeddings": 16}
    text = tiny_config("qwen4_exp").to_dict()
    config = Qwen4ExpConfig(text_config=text, vision_config=vision, architectures=["Qwen4ExpForConditionalGeneration"])
    config.dtype = "float32"
    torch.manual_seed(0)
    model = randomise(modeling_qwen4_exp.Qwen4ExpForConditionalGeneration(config).float().eval())
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen4_exp"
    check_plugin(tmp_path)
    _assert_both_forms_load_alike(model, tmp_path)
