"""The grades of a plugin that `rtp enable` writes besides composed ones: relatives, and files with bridged blocks."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from rtp_runtime.cli import main
from rtp_runtime.testing import check_plugin, tiny_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class AcmeConfig(transformers.Qwen3Config):
    """A newcomer's config: Qwen3's, with a softmax scale of its own."""

    model_type = "acme"
    attention_multiplier: float = 0.2


class AcmeForCausalLM(transformers.Qwen3ForCausalLM):
    """Qwen3 with another softmax scale."""

    config_class = AcmeConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.scaling = config.attention_multiplier


class KinConfig(transformers.Glm4MoeConfig):
    """A newcomer's config that is GLM-4's by another name."""

    model_type = "kin"


class KinForCausalLM(transformers.Glm4MoeForCausalLM):
    """GLM-4 by another name."""

    config_class = KinConfig


@pytest.fixture
def newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers knows them, and no plugin does."""
    now = sys.modules["transformers"]  # which replaces itself while it is imported
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    for config, model in ((AcmeConfig, AcmeForCausalLM), (KinConfig, KinForCausalLM)):
        monkeypatch.setattr(now, model.__name__, model, raising=False)
        monkeypatch.setattr(now, config.__name__, config, raising=False)
        monkeypatch.setitem(CONFIG_MAPPING_NAMES, config.model_type, config.__name__)
        monkeypatch.setitem(mapping._extra_content, config.model_type, config)


def enable(config: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], Path]:
    """(what `rtp enable --json` says, the checkpoint)."""
    checkpoint = tiny_checkpoint(config.to_dict(), folder / "checkpoint")
    assert main(["enable", str(checkpoint), "--out", str(folder / "plugin"), "--json"]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said, checkpoint


@pytest.mark.usefixtures("newcomers")
def test_relative(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = AcmeConfig(**SIZES, head_dim=16, attention_multiplier=0.3, architectures=["AcmeForCausalLM"])
    said, checkpoint = enable(config, tmp_path, capsys)
    assert said["verdict"] == "relative"
    assert said["recognised"][1:] == ["but: the softmax scale is attention_multiplier"]
    package = tmp_path / "plugin/src/rtp_plugin_acme"
    assert "class AcmeForCausalLM(Qwen3ForCausalLM)" in (package / "acme.py").read_text()
    assert "rtp-plugin-qwen" in (tmp_path / "plugin/pyproject.toml").read_text()
    monkeypatch.syspath_prepend(package.parent)
    check_plugin(checkpoint, ["rtp_plugin_acme"])


@pytest.mark.usefixtures("newcomers")
def test_a_relative_declines_what_its_parent_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "topk_group": 1}
    config = KinConfig(**SIZES, **experts, n_group=2, architectures=["KinForCausalLM"])
    said, _ = enable(config, tmp_path, capsys)
    assert said["verdict"] == "relative"
    monkeypatch.syspath_prepend(tmp_path / "plugin/src")
    accepts = importlib.import_module("rtp_plugin_kin.kin").accepts
    assert accepts(config).ok
    config.n_group = 3
    assert not accepts(config).ok


def test_bridged(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Differential attention is none of ours: the block is transformers', its keys and values are in our pools."""
    config = transformers.DiffLlamaConfig(**SIZES, architectures=["DiffLlamaForCausalLM"])
    said, checkpoint = enable(config, tmp_path, capsys)
    assert said["verdict"] == "bridged"
    package = tmp_path / "plugin/src/rtp_plugin_diffllama"
    text = (package / "diffllama.py").read_text()
    assert "DIFF_LLAMA_ATTENTION = " in text and "DecoderLayer(nn.Module)" in text and "proven_with" in text
    monkeypatch.syspath_prepend(package.parent)
    check_plugin(checkpoint, ["rtp_plugin_diffllama"])
    assert main(["inspect", str(checkpoint), "--plugin", "rtp_plugin_diffllama", "--json"]) == 0
    bridged = json.loads(capsys.readouterr().out)["bridged"]
    target = "transformers.models.diffllama.modeling_diffllama:DiffLlamaAttention"
    assert {"block": "model.layers.1.self_attn", "target": target} in bridged
    with pytest.MonkeyPatch.context() as other:
        other.setattr("rtp_runtime.bridge.target.installed_version", lambda: "4.0")
        assert main(["inspect", str(checkpoint), "--plugin", "rtp_plugin_diffllama", "--json"]) == 2
    assert "proven with 5." in capsys.readouterr().out
