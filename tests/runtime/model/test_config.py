"""Configs: transformers' class where it knows the type, reads tracked in every form, errors that say what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rtp_runtime.errors import ConfigError
from rtp_runtime.model import ModelConfig, load_config, rope_parameters, text_config

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "initializer_range": 0.02,
    "rope_theta": 5000.0,
    "torch_dtype": "bfloat16",
}


def write(directory: Path, config: Any) -> Path:
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return directory


def test_behaves_as_transformers_config(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, QWEN3))
    assert (config.architecture, config.model_type, config.raw) == ("Qwen3ForCausalLM", "qwen3", QWEN3)
    assert type(config.hf).__name__ == "Qwen3Config"
    assert config.head_dim == 32 and config.rms_norm_eps == 1e-6
    assert config.layer_types == ["full_attention", "full_attention"]
    assert load_config(tmp_path / "config.json").raw == QWEN3


def test_reading_a_config_does_not_change_the_raw_json(tmp_path: Path) -> None:
    nested = QWEN3 | {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}}
    config = load_config(write(tmp_path, nested))
    assert config.rope_parameters["factor"] == 2.0
    assert config.raw == nested == json.loads((tmp_path / "config.json").read_text())


def test_what_is_missing_behaves_as_a_missing_attribute_and_reads_as_an_error(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, QWEN3))
    assert getattr(config, "num_experts", None) is None and not hasattr(config, "num_experts")
    with pytest.raises(ConfigError, match="has no 'num_experts', which the model needs") as caught:
        _ = config.num_experts
    assert str(tmp_path) in str(caught.value)


def test_unread_keys(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, QWEN3 | {"mystery": 3}))
    assert config.unread_keys() == [
        "hidden_size", "head_dim", "num_hidden_layers", "initializer_range", "rope_theta", "mystery",
    ]  # fmt: skip
    assert config.hidden_size == 64 and config.head_dim == 32
    assert config.unread_keys() == ["num_hidden_layers", "initializer_range", "rope_theta", "mystery"]
    assert config.read_values()["hidden_size"] == 64


@pytest.mark.parametrize(
    "form",
    [
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}},
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_rope_parameters_in_every_form(form: dict[str, Any], known: bool, tmp_path: Path) -> None:
    base = {"architectures": ["XForCausalLM"], "model_type": "qwen3" if known else "nobody_knows"}
    config = load_config(write(tmp_path, base | form))
    rope = rope_parameters(config)
    assert (rope.rope_type, rope.theta, rope.factor) == ("linear", 1e6, 2.0)
    assert config.unread_keys() == []


def test_rope_parameters_of_three_axes_in_an_old_file(tmp_path: Path) -> None:
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    raw = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"} | sizes | rope
    config = load_config(write(tmp_path, raw))
    found = rope_parameters(config.text_config)
    assert (found.rope_type, found.theta, found.mrope_section) == ("default", 1e6, (2, 3, 3))
    assert not found.mrope_interleaved
    assert rope_parameters(load_config(write(tmp_path, raw | {"model_type": "nobody_knows"}))) == found


def test_rope_keys_that_the_table_does_not_read_stay_unread(tmp_path: Path) -> None:
    values = {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.5, "surprise": 1}
    config = load_config(write(tmp_path, QWEN3 | {"rope_parameters": values}))
    rope_parameters(config)
    assert {"rope_parameters.partial_rotary_factor", "rope_parameters.surprise"} <= set(config.unread_keys())
    assert config.rope_parameters.get("partial_rotary_factor") == 0.5
    assert "rope_parameters.partial_rotary_factor" not in config.unread_keys()
    assert dict(config.rope_parameters)["surprise"] == 1
    assert not any(key.startswith("rope_parameters") for key in config.unread_keys())


def test_rope_parameters_by_layer_type(tmp_path: Path) -> None:
    values = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    raw = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "rope_parameters": values}
    config = load_config(write(tmp_path, raw))
    assert rope_parameters(config, "sliding_attention").theta == 1e4
    assert "rope_parameters.full_attention.factor" in config.unread_keys()
    assert rope_parameters(config, "full_attention").factor == 8.0


def test_theta_has_no_default(tmp_path: Path) -> None:
    raw = {key: value for key, value in QWEN3.items() if key != "rope_theta"}
    config = load_config(write(tmp_path, raw))
    assert config.hf.rope_parameters["rope_theta"]  # transformers puts one in
    with pytest.raises(ConfigError, match="holds no rope_theta"):
        rope_parameters(config)


def test_rope_errors_are_about_the_config(tmp_path: Path) -> None:
    raw = {"architectures": ["X"], "model_type": "nobody_knows", "rope_theta": 1e4, "rope_scaling": {"type": "spiral"}}
    with pytest.raises(ConfigError, match=r"config\.json: .*spiral"):
        rope_parameters(load_config(write(tmp_path, raw)))


def test_nested_configs_are_tracked(tmp_path: Path) -> None:
    text = {"model_type": "qwen3_vl_text", "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2}
    raw = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "text_config": text}
    config = load_config(write(tmp_path, raw))
    assert config.text_config.head_dim == 16
    unread = config.unread_keys()
    assert "text_config.hidden_size" in unread and "text_config.head_dim" not in unread
    with pytest.raises(ConfigError, match=r"text_config\.no_such_key"):
        _ = config.text_config.no_such_key


def test_aliases_of_transformers_count_as_reads(tmp_path: Path) -> None:
    raw = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_local_experts": 16}
    config = load_config(write(tmp_path, raw))
    assert config.num_experts == 16 and config.unread_keys() == []


def test_a_model_type_that_transformers_does_not_know(tmp_path: Path) -> None:
    raw = {"architectures": ["MyModel"], "model_type": "nobody_knows", "hidden_size": 8, "inner": {"a": 1, "b": 2}}
    config = load_config(write(tmp_path, raw))
    assert config.hidden_size == 8 and config.inner["a"] == 1
    assert config.unread_keys() == ["inner.b"]
    with pytest.raises(ConfigError, match="has no 'num_layers'"):
        _ = config.num_layers


def test_remote_code_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "configuration_evil.py").write_text("raise SystemExit('executed')\n")
    raw = {"architectures": ["Evil"], "model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"}}
    config = load_config(write(tmp_path, raw))
    assert not hasattr(config, "hidden_size")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a list, not a JSON object"),
        ("[" * 100_000, "not JSON"),
        ({"model_type": "qwen3_moe"}, r'no architectures.*"architectures": \["Qwen3MoeForCausalLM"\]'),
        ({"architectures": []}, r"architectures = \[\]"),
        ({"architectures": None}, "architectures = None"),
        ({"architectures": ["../../evil"]}, "architectures"),
        ({"architectures": "Qwen3ForCausalLM"}, "architectures"),
    ],
)
def test_configs_that_cannot_be_used(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(write(tmp_path, content))
    assert "config.json" in str(caught.value)


def test_what_is_not_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="is not a file"):
        load_config(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: not found"):
        load_config(tmp_path)


def test_what_transformers_refuses_is_told_with_the_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, QWEN3 | {"hidden_size": "wide"}))
    with pytest.raises(ConfigError, match=r"config\.json: transformers cannot read it"):
        _ = config.hf


def test_tie_flags_and_dtype_at_any_level() -> None:
    raw = {
        "architectures": ["X"],
        "tie_word_embeddings": True,
        "text_config": {"tie_word_embeddings": False, "dtype": "bfloat16"},
    }
    config = ModelConfig(raw)
    assert config.tie_flags() == {"tie_word_embeddings": True, "text_config.tie_word_embeddings": False}
    assert config.declared_dtype() == "bfloat16"
    assert ModelConfig({"architectures": ["X"], "torch_dtype": "torch.float16"}).declared_dtype() == "float16"
    assert ModelConfig({"architectures": ["X"]}).declared_dtype() is None


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [(True, None, True), (False, True, False), (None, True, True), (None, None, False), (True, False, True)],
)
def test_the_text_part_of_a_wrapper(outer: bool | None, inner: bool | None, tied: bool, tmp_path: Path) -> None:
    raw: dict[str, Any] = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
    raw["text_config"] = {"model_type": "qwen3_vl_text", "hidden_size": 48}
    for part, value in ((raw, outer), (raw["text_config"], inner)):
        if value is not None:
            part["tie_word_embeddings"] = value
    config = load_config(write(tmp_path, raw))
    text = text_config(config)
    assert (text.hidden_size, text.tie_word_embeddings) == (48, tied)
    assert text_config(config.hf).hidden_size == 48
    assert config.unread_keys() == ["text_config.model_type"]
    plain = load_config(write(tmp_path, QWEN3))
    assert text_config(plain) is plain


def test_the_text_part_that_an_old_file_holds_at_its_top(tmp_path: Path) -> None:
    raw = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_size": 48}
    raw |= {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}, "mystery": 1}
    config = load_config(write(tmp_path, raw))
    text = text_config(config)
    assert text.hidden_size == 48 and rope_parameters(text).mrope_section == (1, 1, 1)
    assert config.unread_keys() == ["mystery"]


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import rtp_runtime.model, rtp_runtime.weights, sys; "
        "sys.exit(bool({'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_numbers_that_json_cannot_say(tmp_path: Path) -> None:
    """Written by transformers: the steps of Mamba 2 have no upper limit."""
    from transformers import Mamba2Config

    Mamba2Config(architectures=["Mamba2ForCausalLM"], time_step_limit=(0.5, float("inf"))).save_pretrained(tmp_path)
    assert list(load_config(tmp_path).hf.time_step_limit) == [0.5, float("inf")]
