"""What `rtp enable` promises apart from numbers: exits, refusals, names, files, and that it never overwrites."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, XLNetConfig

from rtp_runtime.cli import main
from rtp_runtime.cli.enable import install_command
from rtp_runtime.testing import check_plugin, tiny_checkpoint
from rtp_runtime.testing.tiny_configs import TINY

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
FILES = {
    "README.md",
    "pyproject.toml",
    "src/rtp_plugin_llama/__init__.py",
    "src/rtp_plugin_llama/llama.py",
    "src/rtp_plugin_llama/py.typed",
    "tests/config.json",
    "tests/test_llama.py",
}

Enable = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def enable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Enable:
    """Run the command on a config in an empty working directory; exit status and its JSON ({} for an error)."""
    monkeypatch.chdir(tmp_path)

    def run(config: dict[str, Any], *arguments: str) -> tuple[int, dict[str, Any]]:
        source = tmp_path / "source"
        source.mkdir(exist_ok=True)
        (source / "config.json").write_text(json.dumps(config))
        status = main(["enable", str(source / "config.json"), "--json", *arguments])
        out = capsys.readouterr().out
        return status, json.loads(out) if out else {}

    return run


def described(config: Any, architecture: str) -> dict[str, Any]:
    values: dict[str, Any] = config.to_dict()
    return values | {"architectures": [architecture]}


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def scaffold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scaffold")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert main(["enable", str(folder / "config.json"), "--out", str(folder / "rtp-plugin-llama")]) == 0
    return folder / "rtp-plugin-llama"


def test_the_scaffold_holds_these_files(scaffold: Path) -> None:
    assert everything(scaffold) == FILES


def test_its_metadata_names_plugin_runtime_and_api(scaffold: Path) -> None:
    project = tomllib.loads((scaffold / "pyproject.toml").read_text())["project"]
    assert project["name"] == "rtp-plugin-llama"
    assert project["entry-points"]["rtp.plugins"] == {"llama": "rtp_plugin_llama"}
    assert [name.partition(">")[0] for name in project["dependencies"]] == ["rtp-runtime"]
    assert 'RTP_API = "0.1"' in (scaffold / "src/rtp_plugin_llama/__init__.py").read_text()


def test_its_model_file_uses_components_and_nothing_of_the_reference(scaffold: Path) -> None:
    text = (scaffold / "src/rtp_plugin_llama/llama.py").read_text()
    assert "import transformers" not in text and "from transformers" not in text
    assert "getattr(config" not in text.partition("def accepts")[0]
    assert len(text.splitlines()) < 180


def test_linter_and_type_checker_have_no_complaint(scaffold: Path) -> None:
    root = Path(__file__).parents[3]
    ruff = [["ruff", "check"], ["ruff", "format", "--check"]]
    # From the root, whose cache of torch's types the type checker then shares.
    for command, folder in [*((each, scaffold) for each in ruff), (["mypy"], root)]:
        done = subprocess.run(
            [sys.executable, "-m", *command, str(scaffold / "src")],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_its_own_tests_hold(scaffold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(scaffold / "src")
    checkpoint = tiny_checkpoint(scaffold / "tests/config.json", tmp_path / "checkpoint")
    check_plugin(checkpoint, plugins=["rtp_plugin_llama"])


def test_the_report_ends_with_next_command_and_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(LLAMA))
    assert main(["enable", "config.json"]) == 0
    *_, following, path = capsys.readouterr().out.splitlines()
    assert "pip install ./rtp-plugin-llama" in following
    assert path == "rtp-plugin-llama" and everything(tmp_path / path) == FILES


@pytest.mark.parametrize(
    ("folder", "command"),
    [
        ("rtp-plugin-x", "pip install ./rtp-plugin-x"),
        (".demo/x", "pip install ./.demo/x"),
        ("../x", "pip install ../x"),
        ("/opt/x", "pip install /opt/x"),
        ("with space", "pip install './with space'"),
    ],
)
def test_the_install_command_names_a_path(folder: str, command: str) -> None:
    assert install_command(Path(folder)) == command


def test_a_covered_architecture_writes_nothing(enable: Enable, tmp_path: Path) -> None:
    status, found = enable(TINY["qwen3"].text | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    assert status == 0 and found["verdict"] == "covered" and "rtp-plugin-qwen" in found["served_by"]
    assert everything(tmp_path) == {"source/config.json"}


def test_an_existing_target_is_left_alone(enable: Enable, tmp_path: Path) -> None:
    (tmp_path / "rtp-plugin-llama").mkdir()
    assert enable(LLAMA)[0] == 2
    assert everything(tmp_path) == {"source/config.json"}


@pytest.mark.parametrize(
    ("config", "architecture", "blocks"),
    [
        (XLNetConfig(n_layer=2), "XLNetLMHeadModel", ["rel_attn (XLNetRelativeAttention)"]),
    ],
    ids=["xlnet"],
)
def test_what_cannot_be_built_is_refused_by_name(
    enable: Enable, tmp_path: Path, config: Any, architecture: str, blocks: list[str]
) -> None:
    status, found = enable(described(config, architecture))
    assert status == 3 and found["verdict"] == "refused" and found["path"] is None
    for block in blocks:
        assert any(block in refusal["block"] for refusal in found["not_recognised"]), found["not_recognised"]
    assert all(refusal["needs"] for refusal in found["not_recognised"])
    assert everything(tmp_path) == {"source/config.json"}


def test_a_wrapper_of_a_text_model_is_refused(enable: Enable) -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    status, found = enable(config | {"text_config": {"model_type": "gemma3_text"}, "vision_config": {}})
    assert status == 3 and "vision_config" in found["not_recognised"][0]["reason"]


def test_a_rope_type_that_is_not_ours_is_named(enable: Enable) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    status, found = enable({key: LLAMA[key] for key in LLAMA if key != "rope_theta"} | {"rope_parameters": rope})
    assert status == 3 and "rotary_emb" in found["not_recognised"][0]["block"]
    assert "dynamic" in found["not_recognised"][0]["reason"]


def test_positions_scaled_beyond_their_context_are_noticed(enable: Enable, tmp_path: Path) -> None:
    """Ministral3 scales queries by position, which no short prompt shows at the sizes of its config."""
    from transformers import Ministral3Config

    status, _ = enable(described(Ministral3Config(num_hidden_layers=2), "Ministral3ForCausalLM"))
    source = tmp_path / "rtp-plugin-ministral3/src/rtp_plugin_ministral3/ministral3.py"
    assert status == 3 or "llama_4_scaling_beta" in source.read_text()


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "../../evil"},
        {"model_type": "/tmp/evil"},
        {"model_type": "llama\n[project]"},
        {"model_type": 'llama"; import os'},
        {"model_type": ""},
        {"model_type": None},
        {"model_type": "class"},
        {"model_type": "l" * 300},
        {"architectures": ["../LlamaForCausalLM"]},
        {"architectures": ["Llama ForCausalLM"]},
        {"architectures": []},
        {"model_type": "mistral"},
        {"num_hidden_layers": 0},
        {"hidden_size": -64},
        {"hidden_size": "64"},
    ],
    ids=lambda change: str(change)[:40],
)
def test_what_is_no_config_is_bad_input(enable: Enable, tmp_path: Path, change: dict[str, Any]) -> None:
    assert enable(LLAMA | change)[0] == 2
    assert everything(tmp_path) == {"source/config.json"}


def test_a_missing_theta_is_bad_input(enable: Enable, tmp_path: Path) -> None:
    """transformers has a default for it; a wrong one shows at long positions only."""
    assert enable({key: value for key, value in LLAMA.items() if key != "rope_theta"})[0] == 2
    assert everything(tmp_path) == {"source/config.json"}


def test_values_of_a_config_stay_values(enable: Enable, tmp_path: Path) -> None:
    """A string that would be code if it were pasted into the model file."""
    evil = '"; open("pwned", "w"); "'
    config = described(LlamaConfig(**{key: LLAMA[key] for key in LLAMA if key != "architectures"}), "LlamaForCausalLM")
    status, _ = enable(config | {"attention_bias": False, "comment": evil, "mlp_bias": False})
    assert status == 0
    assert not (tmp_path / "pwned").exists()
    assert evil not in (tmp_path / "rtp-plugin-llama/src/rtp_plugin_llama/llama.py").read_text()


def test_code_of_a_checkpoint_does_not_run(enable: Enable, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "source").mkdir()
    (tmp_path / "source/modeling_new.py").write_text(f"open({str(marker)!r}, 'w')\n")
    remote = {"AutoConfig": "modeling_new.NewConfig", "AutoModelForCausalLM": "modeling_new.NewForCausalLM"}
    config = LLAMA | {"model_type": "new", "architectures": ["NewForCausalLM"], "auto_map": remote}
    status, found = enable(config)
    assert status == 3 and "--trust-remote-code" in found["not_recognised"][0]["reason"]
    assert not marker.exists()


def test_tensors_that_nothing_accounts_for_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    checkpoint = tiny_checkpoint(LLAMA, tmp_path / "checkpoint")
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"] = tensors["model.norm.weight"].clone()
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert main(["enable", str(checkpoint), "--out", str(tmp_path / "plugin"), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert "q_proj.bias" in found["not_recognised"][0]["reason"]
    assert not (tmp_path / "plugin").exists()
