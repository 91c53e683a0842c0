"""The text of GLM-5.3-Flash against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_runtime.errors import RtpError
from rtp_runtime.model import LoadedModel, load_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.compare import check_tiny
from rtp_runtime.testing.tiny_models import write_tiny

LINEAR, INDEXED = "linear_attention", "indexed_attention"


def layers(*types: str, indexers: list[str] | None = None, mlps: list[str] | None = None) -> dict[str, Any]:
    """A config of these layers, each with an indexer and experts unless told otherwise."""
    count = len(types)
    return {
        "num_hidden_layers": count,
        "layer_types": list(types),
        "indexer_types": indexers or ["full"] * count,
        "mlp_layer_types": mlps or ["sparse"] * count,
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "three linear layers, one that selects, one that shares": {},
    "one linear layer, dense, no lower bound of the decay": layers(LINEAR, mlps=["dense"])
    | {"linear_lower_bound": None},
    "one attending layer, routed, biases, tied head": layers(INDEXED)
    | {"attention_bias": True, "tie_word_embeddings": True},
    "attention before a linear layer, two streams, few iterations": layers(
        INDEXED, INDEXED, LINEAR, indexers=["full", "shared", "full"]
    )
    | {"hc_mult": 2, "hc_sinkhorn_iters": 2, "hc_eps": 1e-4},
    "one stream, another lower bound, longer convolution": layers(LINEAR, INDEXED)
    | {"hc_mult": 1, "linear_lower_bound": -1.5, "linear_conv_kernel_dim": 7},
    "pools of one token, another clamp": layers(INDEXED, LINEAR)
    | {"index_kpool": 1, "index_topk": 5, "swiglu_limit": 0.3},
    "one pool of eight tokens": layers(INDEXED, mlps=["dense"]) | {"index_kpool": 8, "index_topk": 8},
    "more pools than there are, two of four groups of experts": layers(LINEAR, INDEXED)
    | {"index_kpool": 2, "index_topk": 400, "n_routed_experts": 12, "n_group": 4, "topk_group": 2},
    "odd sizes": layers(LINEAR, INDEXED)
    | {
        "vocab_size": 391,
        "hidden_size": 60,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 22,
        "kv_lora_rank": 30,
        "qk_nope_head_dim": 14,
        "v_head_dim": 18,
        "linear_num_heads": 5,
        "linear_head_dim": 12,
        "index_n_heads": 15,
        "index_head_dim": 14,
        "index_topk": 9,
        "index_kpool": 3,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 18,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(variant: str) -> None:
    check_tiny("glm5_next", **VARIANTS[variant])


def test_matches_transformers_for_other_weights() -> None:
    """Of seed 2: those of 1 give two experts scores so alike that the reference's cached run differs from its own."""
    check_tiny("glm5_next", 2)


def load(directory: Path) -> LoadedModel:
    return load_model(directory, dtype="float32", plugins=load_plugins())


def test_what_transformers_holds_in_memory_is_a_layout(
    write_stacked: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    hub, stacked = tmp_path / "hub", tmp_path / "stacked"
    write_stacked(write_tiny("glm5_next", hub), stacked)
    first, second = (load(directory).module.state_dict() for directory in (hub, stacked))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_images_and_predictions_are_left_out(tmp_path: Path) -> None:
    write_tiny("glm5_next", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    last, extra = "model.language_model.layers.4.", "model.language_model.layers.5."
    block = {name.replace(last, extra): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    block[extra + "shared_head.norm.weight"] = torch.ones(64)
    save_file(tensors | block, tmp_path / "model.safetensors", metadata={"format": "pt"})
    images = {name for name in tensors if name.startswith("model.visual.")}
    assert load(tmp_path).weights.audit.skipped.keys() == images | block.keys()


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("indexer_types", ["full", "full", "full", "shared", "shared"], "no layer before it makes one"),
        ("index_kpool_always_select_tail", False, "would attend to nothing"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path: Path, key: str, value: Any, reason: str) -> None:
    write_tiny("glm5_next", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RtpError, match=reason):
        load(tmp_path)
