"""MiniMax (Text-01, M1) against transformers, whose cached runs are sound only where layer 0 holds full attention.

What is compared with are full forwards, and `generate`, which passes positions and so is right in any case.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_runtime.model import load_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.compare import check_plugin, check_tiny
from rtp_runtime.testing.tiny_models import rope, write_tiny

LINEAR, FULL = "linear_attention", "full_attention"
FACTORS = {
    "full_attn_alpha_factor": 1.7,
    "full_attn_beta_factor": 0.6,
    "linear_attn_alpha_factor": 0.8,
    "linear_attn_beta_factor": 1.4,
    "mlp_alpha_factor": 2.3,
    "mlp_beta_factor": 0.9,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "three heads of one group, odd sizes": {
        "vocab_size": 391,
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "intermediate_size": 22,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "block_size": 5,
    },
    "five heads, each its own group; the released block": {
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "block_size": 256,
    },
    "head dim from the hidden size, tied head": {"head_dim": None, "tie_word_embeddings": True},
    "one linear layer": {"num_hidden_layers": 1, "layer_types": [LINEAR]},
    "one full layer, one expert": {
        "num_hidden_layers": 1,
        "layer_types": [FULL],
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
    },
    "factors that differ": FACTORS,
    "a window on full layers": {"layer_types": [FULL, LINEAR, FULL, FULL], "sliding_window": 7},
    "blocks of one token, another activation": {"block_size": 1, "hidden_act": "gelu"},
    "rotary factor that the reference overlooks": {"rope_parameters": rope(1e4, partial_rotary_factor=0.5)},
}


@pytest.mark.parametrize("name", ["minimax", "minimax_full_first"])
def test_matches_transformers(name: str) -> None:
    check_tiny(name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_match_transformers(variant: str) -> None:
    check_tiny("minimax", seed=1, **VARIANTS[variant])


def rewrite_config(directory: Path, **values: Any) -> None:
    """Change keys of the checkpoint's config; None removes one."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_takes_the_keys_of_older_configs(tmp_path: Path) -> None:
    """Flat theta; without layer_types the reference alternates, full attention first, which is what the list says."""
    write_tiny("minimax_full_first", tmp_path)
    rewrite_config(
        tmp_path,
        rope_parameters=None,
        rope_theta=10000000,
        layer_types=None,
        attn_type_list=[1, 0, 1, 0],
        postnorm=True,
    )
    check_plugin(tmp_path)


def test_an_older_list_decides_where_nothing_else_does(tmp_path: Path) -> None:
    """Loading it audits the layers: those of the other kind would lack their tensors."""
    write_tiny("minimax", tmp_path)
    before = load_model(tmp_path, dtype="float32", plugins=load_plugins())
    rewrite_config(tmp_path, layer_types=None, attn_type_list=[0, 0, 0, 1])
    after = load_model(tmp_path, dtype="float32", plugins=load_plugins())
    assert list(after.states) == list(before.states)
    rewrite_config(tmp_path, layer_types=[LINEAR, LINEAR, LINEAR, FULL], attn_type_list=[1, 1, 1, 1])
    assert list(load_model(tmp_path, dtype="float32", plugins=load_plugins()).states) == list(before.states)


def test_states_of_linear_layers_are_float32_whatever_the_dtype(tmp_path: Path) -> None:
    write_tiny("minimax", tmp_path)
    states = load_model(tmp_path, dtype="bfloat16", plugins=load_plugins()).states
    assert [list(layer) for layer in states] == [["state"], ["state"], ["state"], ["kv"]]
    assert all(layer["state"].dtype == "float32" for layer in list(states)[:3])


def test_decay_tables_are_left_out_and_may_be_missing(tmp_path: Path) -> None:
    """Files in bfloat16 hold them rounded; they are no weights."""
    write_tiny("minimax", tmp_path)
    file = tmp_path / "model.safetensors"
    skipped = load_model(tmp_path, dtype="float32", plugins=load_plugins()).weights.audit.skipped
    assert len(skipped) == 12 and all("decay" in name or "slope" in name for name in skipped)
    save_file({name: tensor for name, tensor in load_file(file).items() if name not in skipped}, file)
    assert not load_model(tmp_path, dtype="float32", plugins=load_plugins()).weights.audit.skipped


def test_stacked_experts_load_to_the_same_parameters(tmp_path: Path) -> None:
    hub, fused = tmp_path / "hub", tmp_path / "fused"
    reference = write_tiny("minimax", hub)
    fused.mkdir()
    (fused / "config.json").write_text((hub / "config.json").read_text())
    save_file(
        {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}, fused / "model.safetensors"
    )

    plugins = load_plugins()
    first = load_model(hub, dtype="float32", plugins=plugins).module.state_dict()
    second = load_model(fused, dtype="float32", plugins=plugins).module.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
