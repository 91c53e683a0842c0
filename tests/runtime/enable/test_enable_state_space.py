"""`rtp enable` on state spaces and convolutions: tiny random checkpoint, scaffold, our logits and tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rtp_runtime import LLM, SamplingParams
from rtp_runtime.cli import main
from rtp_runtime.testing.compare import TOLERANCE, noise, reference_logits
from rtp_runtime.testing.tiny_models import randomise

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ATTENTION = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
MAMBA = {"state_size": 4, "time_step_rank": 3}
SPACE = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_chunk_size": 16}
HEADS = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 6, "chunk_size": 16}
SCALES = {"ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3], "ssm_in_multiplier": 0.8, "ssm_out_multiplier": 0.6}
WIDE = {"hidden_size": 128, "lru_width": 128, "num_attention_heads": 8}  # the root of 64 hides how it is rounded
GRIFFIN = {"attention_window_size": 8, "num_hidden_layers": 3} | WIDE
NORMED = {"mamba_d_ssm": 64, "mamba_rms_norm": True}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_mamba": ("FalconMamba", MAMBA | {"use_bias": True}),
    "mamba2": (
        "Mamba2",
        {
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 6,
            "chunk_size": 16,
            "time_step_limit": (0.3, 2.0),
        },
    ),
    "bamba": ("Bamba", ATTENTION | SPACE | {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", ATTENTION | SPACE | NORMED | SCALES),
    "recurrent_gemma": ("RecurrentGemma", ATTENTION | GRIFFIN),
    "lfm2": ("Lfm2", ATTENTION | {"layer_types": ["conv", "full_attention"], "conv_bias": True}),
}
LENGTHS = (1, 5, 60)


def write_checkpoint(prefix: str, overrides: dict[str, Any], directory: Path) -> Any:
    config = getattr(transformers, f"{prefix}Config")(**(SIZES | overrides))
    config.dtype = "float32"
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
    randomise(model)
    model.save_pretrained(directory)
    model.set_attn_implementation("eager")
    return model


def continued(reference: Any, ids: list[int], count: int) -> list[int]:
    """Greedy, each token from a forward over all before it: some of these references lose a limit with their cache."""
    found = list(ids)
    for _ in range(count):
        found.append(int(reference_logits(reference, found)[-1].argmax()))
    return found[len(ids) :]


@pytest.mark.parametrize("model_type", MODELS)
def test_scaffold_computes_what_transformers_does(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, plugin = tmp_path / "checkpoint", tmp_path / "plugin"
    reference = write_checkpoint(*MODELS[model_type], checkpoint)
    assert main(["enable", str(checkpoint), "--out", str(plugin)]) == 0, capsys.readouterr().out
    for command in (["ruff", "check"], ["ruff", "format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", *command, "."], cwd=plugin, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.syspath_prepend(plugin / "src")
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, SIZES["vocab_size"], (length,), generator=draw).tolist() for length in LENGTHS]
    wanted = [reference_logits(reference, ids) for ids in prompts]
    tolerance = max(TOLERANCE, 3 * max(noise(reference, ids) for ids in prompts))
    plugins = [f"rtp_plugin_{model_type}"]
    with LLM(checkpoint, plugins=plugins, num_blocks=16, max_num_seqs=2, max_num_batched_tokens=16) as llm:
        for ids, logits in zip(prompts, wanted, strict=True):
            assert float((llm.logits(ids) - logits).abs().max() / logits.std()) <= tolerance
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    assert [list(output.token_ids) for output in outputs] == [continued(reference, ids, 6) for ids in prompts]


def test_a_model_without_attention_passes_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its stream is added up in float32, and its head is its embedding."""
    checkpoint = tmp_path / "checkpoint"
    write_checkpoint("Mamba", MAMBA, checkpoint)
    assert main(["enable", str(checkpoint), "--out", str(tmp_path / "plugin")]) == 0
    monkeypatch.syspath_prepend(tmp_path / "plugin/src")
    capsys.readouterr()
    status = main(["check", str(checkpoint), "--plugin", "rtp_plugin_mamba", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (status, report["verdict"]) == (0, "MATCH"), report["failed"]
