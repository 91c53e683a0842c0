"""The conformance suite passes a right plugin and fails wrong ones, each in the comparison that can see the fault."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from rtp_runtime.cli import main
from rtp_runtime.errors import RtpError
from rtp_runtime.testing import check_plugin, tiny_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "rope_theta": 10000.0,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(CONFIG, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def plugin(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package that `rtp enable` writes."""
    folder = tmp_path_factory.mktemp("scaffold") / "plugin"
    assert main(["enable", str(checkpoint), "--out", str(folder)]) == 0
    return folder / "src/rtp_plugin_llama"


def edited_copy(plugin: Path, folder: Path, name: str, right: str = "", wrong: str = "") -> str:
    """A package `name` in `folder`: the plugin with one edit of its model."""
    shutil.copytree(plugin, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    start, model = folder / name / "__init__.py", folder / name / "llama.py"
    start.write_text(start.read_text().replace(plugin.name, name))
    assert right in model.read_text()
    model.write_text(model.read_text().replace(right, wrong, 1))
    return name


def test_a_right_plugin_passes(checkpoint: Path, plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = edited_copy(plugin, tmp_path, "rtp_right")
    monkeypatch.syspath_prepend(tmp_path)
    check_plugin(checkpoint, plugins=[name])


FAULTS = {
    "rotary layout": ('Rotary("half")', 'Rotary("interleaved")'),
    "residual dropped": ("hidden = hidden + self.mlp(", "hidden = self.mlp("),
    "gate and up exchanged": (
        'FromCheckpoint(LAYER + "mlp.gate_proj.weight", (intermediate, hidden)),',
        'FromCheckpoint(LAYER + "mlp.up_proj.weight", (intermediate, hidden)),',
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_plugin_fails(
    fault: str, checkpoint: Path, plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = edited_copy(plugin, tmp_path, f"rtp_wrong_{list(FAULTS).index(fault)}", *FAULTS[fault])
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((AssertionError, RtpError), match=r"logits differ|gate_proj"):
        check_plugin(checkpoint, plugins=[name])


def test_positions_counted_anew_show_in_chunks(
    checkpoint: Path, plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole prompts cannot show it."""
    right, wrong = "self.rotary_emb(batch.positions)", "self.rotary_emb(batch.positions - batch.positions.min())"
    name = edited_copy(plugin, tmp_path, "rtp_wrong_chunks", right, wrong)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AssertionError, match="chunks of 16"):
        check_plugin(checkpoint, plugins=[name])


def test_a_forgotten_tensor_is_found_by_the_audit(
    checkpoint: Path, plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = 'weight(LAYER + "self_attn.o_proj.bias", hidden),'
    name = edited_copy(plugin, tmp_path, "rtp_wrong_audit", right, "")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RtpError, match=r"o_proj\.bias"):
        check_plugin(checkpoint, plugins=[name])
