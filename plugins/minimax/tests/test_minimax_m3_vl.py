"""MiniMax-M3's language model against transformers, on its own and inside a vision-language checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_runtime.errors import UnsupportedModelError
from rtp_runtime.model import LoadedModel, load_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.compare import check_plugin, check_tiny
from rtp_runtime.testing.tiny_models import rope, write_tiny

FULL, SPARSE = "full_attention", "minimax_m3_sparse"
VARIANTS: dict[str, dict[str, Any]] = {
    "three heads of one group, odd sizes": {
        "vocab_size": 391,
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "index_n_heads": 1,
        "index_head_dim": 14,
        "index_block_size": 5,
        "intermediate_size": 18,
        "shared_intermediate_size": 22,
        "dense_intermediate_size": 26,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
    },
    "five heads, each its own group; no block is forced": {
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "index_n_heads": 5,
        "index_local_blocks": 0,
    },
    "one index head for two groups, blocks of one token": {
        "index_n_heads": 1,
        "index_block_size": 1,
        "index_topk_blocks": 5,
    },
    "an index head for each query head": {"index_n_heads": 4},
    "one block, which need not be near": {"index_topk_blocks": 1, "index_local_blocks": 0},
    "more blocks than there are": {"index_topk_blocks": 64},
    "two blocks are forced, blocks of seven": {"index_local_blocks": 2, "index_block_size": 7},
    "blocks longer than the prompts": {"index_block_size": 128},
    "one full layer, dense": {"num_hidden_layers": 1, "layer_types": [FULL], "mlp_layer_types": ["dense"]},
    "one sparse layer, routed": {"num_hidden_layers": 1, "layer_types": [SPARSE], "mlp_layer_types": ["sparse"]},
    "sparse and dense, full and routed": {
        "num_hidden_layers": 2,
        "layer_types": [SPARSE, FULL],
        "mlp_layer_types": ["dense", "sparse"],
        "tie_word_embeddings": True,
    },
    "another slope, limit and scale; whole heads rotated, whatever rotary_dim says": {
        "swiglu_alpha": 0.8,
        "swiglu_limit": 0.3,
        "routed_scaling_factor": 1.3,
        "rope_parameters": rope(1e4),
        "rotary_dim": 8,
    },
    "narrower index than what is rotated": {"index_head_dim": 8},
}


def load(directory: Path) -> LoadedModel:
    return load_model(directory, dtype="float32", plugins=load_plugins())


@pytest.mark.parametrize("name", ["minimax_m3", "minimax_m3_vl"])
def test_matches_transformers(name: str) -> None:
    check_tiny(name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_match_transformers(variant: str) -> None:
    check_tiny("minimax_m3", seed=1, **VARIANTS[variant])


@pytest.mark.parametrize("variant", ["three heads of one group, odd sizes", "sparse and dense, full and routed"])
def test_variants_in_a_vision_language_checkpoint_match_transformers(variant: str) -> None:
    check_tiny("minimax_m3_vl", seed=2, **VARIANTS[variant])


def test_takes_the_keys_of_released_configs(tmp_path: Path) -> None:
    """The indexer's numbers and the kinds of layers stand in lists of 0 and 1, and theta beside the factor."""
    write_tiny("minimax_m3", tmp_path, index_local_blocks=2)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for key in ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks", "index_local_blocks"):
        del config[key]
    for key in ("layer_types", "mlp_layer_types", "rope_parameters"):
        del config[key]
    config |= {"rope_theta": 5000000, "partial_rotary_factor": 0.5, "hidden_act": "swigluoai"}
    config |= {"moe_layer_freq": [0, 1, 1, 1], "sparse_attention_config": {"sparse_attention_freq": [0, 1, 1, 1]}}
    config["sparse_attention_config"] |= {"sparse_num_index_heads": 2, "sparse_index_dim": 32, "sparse_block_size": 4}
    config["sparse_attention_config"] |= {"sparse_topk_blocks": 3, "sparse_local_block": 2}
    file.write_text(json.dumps(config))
    check_plugin(tmp_path)


def test_declines_index_heads_that_cannot_be_shared(tmp_path: Path) -> None:
    write_tiny("minimax_m3", tmp_path, index_n_heads=3)
    with pytest.raises(UnsupportedModelError, match="4 query heads cannot share the choices of 3 index heads"):
        load(tmp_path)


def test_released_names_and_those_in_memory_load_to_the_same_parameters(tmp_path: Path) -> None:
    hub, memory = tmp_path / "hub", tmp_path / "memory"
    reference = write_tiny("minimax_m3_vl", hub)
    memory.mkdir()
    (memory / "config.json").write_text((hub / "config.json").read_text())
    state = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    assert "model.language_model.layers.1.mlp.experts.gate_up_proj" in state
    save_file(state, memory / "model.safetensors")

    first, second = load(hub), load(memory)
    assert (first.weights.layout.name, second.weights.layout.name) == ("hub", "transformers")
    one, other = first.module.state_dict(), second.module.state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_says_what_it_leaves_out(tmp_path: Path) -> None:
    write_tiny("minimax_m3_vl", tmp_path)
    file = tmp_path / "model.safetensors"
    extra = ("mtp.norm.weight", "language_model.mtp.0.fc.weight", "language_model.model.layers.11.enorm.weight")
    save_file(load_file(file) | {name: torch.ones(3) for name in extra}, file)
    skipped = load(tmp_path).weights.audit.skipped
    assert all("multi-token" in skipped[name] for name in extra)
    others = {name: reason for name, reason in skipped.items() if name not in extra}
    assert {name.split(".")[0] for name in others} == {"vision_tower", "multi_modal_projector", "patch_merge_mlp"}
    assert all("only text" in reason for reason in others.values())


def test_index_keys_are_a_state_of_layers_that_choose(tmp_path: Path) -> None:
    write_tiny("minimax_m3_vl", tmp_path)
    assert [list(layer) for layer in load(tmp_path).states] == [["kv"], *[["kv", "index"]] * 3]
