"""`rtp enable` on plain decoders: tiny random checkpoint, scaffold, and our logits against transformers'."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rtp_runtime import LLM
from rtp_runtime.cli import main
from rtp_runtime.testing.compare import TOLERANCE, noise
from rtp_runtime.testing.tiny_models import randomise

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "attention_multiplier": 0.2,
}
SLIDING = {"num_hidden_layers": 3, "sliding_window": 8}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 24}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True}),
    "olmo": ("Olmo", {}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", SLIDING | {"layer_types": KINDS}),
    "granite": ("Granite", MULTIPLIERS),
    "gemma2": ("Gemma2", SLIDING | {"head_dim": 16, "layer_types": KINDS, "query_pre_attn_scalar": 24}),
    "gemma3_text": ("Gemma3Text", SLIDING | {"head_dim": 16, "layer_types": KINDS}),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "use_parallel_residual": False}),
    "cohere": ("Cohere", {"logit_scale": 0.0625}),
    "helium": ("Helium", {"head_dim": 16}),
    "exaone4": ("Exaone4", SLIDING | {"layer_types": KINDS}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 16}),
    "seed_oss": ("SeedOss", {"head_dim": 24, "rope_parameters": YARN}),
}


def write_checkpoint(prefix: str, overrides: dict[str, Any], directory: Path) -> Any:
    config = getattr(transformers, f"{prefix}Config")(**(SIZES | overrides))
    config.dtype = "float32"
    model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config).float().eval()
    randomise(model)
    model.save_pretrained(directory)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("model_type", DECODERS)
def test_scaffold_computes_what_transformers_does(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, plugin = tmp_path / "checkpoint", tmp_path / "plugin"
    reference = write_checkpoint(*DECODERS[model_type], checkpoint)
    assert main(["enable", str(checkpoint), "--out", str(plugin)]) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.splitlines()[-1] == str(plugin)
    monkeypatch.syspath_prepend(plugin / "src")
    ids = torch.randint(3, SIZES["vocab_size"], (60,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.no_grad():
        wanted = reference(torch.tensor([ids])).logits[0]
    with LLM(checkpoint, plugins=[f"rtp_plugin_{model_type}"], num_blocks=16, max_num_seqs=2) as llm:
        error = float((llm.logits(ids) - wanted).abs().max() / wanted.std())
    assert error <= max(TOLERANCE, 3 * noise(reference, ids))


CHECKED = ("llama", "mistral", "olmo3", "gemma3_text", "phi3", "cohere", "exaone4")
"""Plain ones, and those whose reference holds a module's values in a form of its own."""


@pytest.mark.parametrize("model_type", CHECKED)
def test_scaffold_passes_the_check_untouched(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(*DECODERS[model_type], tmp_path / "checkpoint")
    assert main(["enable", str(tmp_path / "checkpoint"), "--out", str(tmp_path / "plugin")]) == 0
    monkeypatch.syspath_prepend(tmp_path / "plugin/src")
    capsys.readouterr()
    status = main(["check", str(tmp_path / "checkpoint"), "--plugin", f"rtp_plugin_{model_type}", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (status, report["verdict"]) == (0, "MATCH"), report["failed"]


def test_scaffolds_are_formatted_and_typed(tmp_path: Path) -> None:
    """Where files differ most: several tables, factors, fused tensors, a feed-forward block of its own."""
    for model_type in ("gemma3_text", "granite", "phi3", "phi", "exaone4"):
        write_checkpoint(*DECODERS[model_type], tmp_path / "checkpoints" / model_type)
        folder = tmp_path / "plugins" / model_type
        assert main(["enable", str(tmp_path / "checkpoints" / model_type), "--out", str(folder)]) == 0
        for command in (["ruff", "check"], ["ruff", "format", "--check"]):
            run_tool([*command, "."], folder)
    # From the root, whose cache of torch's types the type checker then shares.
    run_tool(["mypy", *(str(folder) for folder in (tmp_path / "plugins").glob("*/src"))], Path(__file__).parents[3])


def run_tool(command: list[str], folder: Path) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
