"""`--reference`: the edited module is named whichever side was edited, and nothing crashes.

A cause is looked for where ours was edited; which causes are named is for test_causes and `tools/faults`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rtp_runtime.check import CheckOptions, CheckReport, run_check
from rtp_runtime.errors import CheckpointError

Tensors = dict[str, Any]
STAGES = ("audit", "pinned", "probes")


def copy_with(
    source: Path, copy: Path, config: dict[str, Any] | None = None, edit: Callable[[Tensors], Any] | None = None
) -> Path:
    shutil.copytree(source, copy)
    if config:
        (copy / "config.json").write_text(json.dumps(json.loads((copy / "config.json").read_text()) | config))
    if edit is not None:
        tensors = load_file(copy / "model.safetensors")
        edit(tensors)
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def check(model: Path, reference: Path, explain: bool) -> CheckReport:
    options = CheckOptions(
        model=model, reference=reference, lengths=(10, 40), num_new_tokens=4, stages=STAGES, explain=explain
    )
    return run_check(options)


EDITS = [
    ("qwen2", {"rms_norm_eps": 3e-6}, None, ("model.layers.0.input_layernorm", 0)),
    ("qwen2", {"sliding_window": 7}, None, ("model.layers.2.self_attn", 2)),
    ("qwen2", {"hidden_act": "relu"}, None, ("model.layers.0.mlp", 0)),
    ("qwen2", {"num_attention_heads": 8, "num_key_value_heads": 4}, None, ("model.rotary_emb", 0)),
    ("qwen2", None, lambda t: t.pop("model.layers.1.self_attn.q_proj.bias"), ("model.layers.1.self_attn.q_proj", 1)),
    (
        "qwen3",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}},
        None,
        ("model.rotary_emb", 0),
    ),
    ("qwen3", {"vocab_size": 300}, None, ("model.embed_tokens", None)),
    ("qwen3", {"attention_bias": True}, None, ("model.layers.0.self_attn.q_proj", 0)),
    ("qwen3", None, lambda t: t["model.embed_tokens.weight"].mul_(1.0001), ("model.embed_tokens", None)),
    ("qwen3_moe", {"num_experts_per_tok": 3}, None, ("model.layers.0.mlp.gate", 0)),
    (
        "qwen3_moe",
        None,
        lambda t: t.pop("model.layers.2.mlp.experts.4.up_proj.weight"),
        ("model.layers.2.mlp.experts", 2),
    ),
]


@pytest.mark.parametrize("side", ["ours", "reference"])
@pytest.mark.parametrize(("name", "config", "edit", "place"), EDITS)
def test_edit_is_named(
    name: str,
    config: dict[str, Any] | None,
    edit: Callable[[Tensors], Any] | None,
    place: tuple[str, int | None],
    side: str,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    edited = copy_with(checkpoint(name), tmp_path / "edited", config, edit)
    pair = (edited, checkpoint(name)) if side == "ours" else (checkpoint(name), edited)
    report = check(*pair, explain=side == "ours")
    assert report.exit == 1
    assert report.first_wrong is not None
    assert (report.first_wrong.module, report.first_wrong.layer) == place


@pytest.mark.parametrize("side", ["ours", "reference"])
def test_a_missing_layer_is_named(side: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    config = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}
    edited = copy_with(checkpoint("qwen2"), tmp_path / "edited", config)
    pair = (edited, checkpoint("qwen2")) if side == "ours" else (checkpoint("qwen2"), edited)
    report = check(*pair, explain=side == "ours")
    assert report.first_wrong is not None
    assert (report.first_wrong.module, report.first_wrong.layer) == ("model.layers.3", 3)


def test_what_both_sides_refuse_is_the_checkpoints_fault(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    edited = copy_with(checkpoint("qwen3"), tmp_path / "edited", None, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        run_check(CheckOptions(model=edited, lengths=(10, 40)))
