"""`rtp enable` on decoders whose attention, positions or norms are unlike Llama's: their logits, in chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rtp_runtime import LLM
from rtp_runtime.cli import main
from rtp_runtime.enable.recording import FunctionCall
from rtp_runtime.enable.written_out import written_out
from rtp_runtime.testing.compare import TOLERANCE, noise
from rtp_runtime.testing.tiny_models import randomise

GPT: dict[str, Any] = {"vocab_size": 160, "n_embd": 96, "n_layer": 2, "n_positions": 256, "eos_token_id": 2}
PLAIN: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OPT = {"ffn_dim": 80, "word_embed_proj_dim": 40, "do_layer_norm_before": False}
LOCAL = {"num_layers": 2, "num_heads": 6, "window_size": 8, "attention_types": [[["global", "local"], 1]]}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.1,
}
GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 3}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT | {"n_head": 6}),  # [in, out] weights, learned positions
    "codegen": ("CodeGenForCausalLM", GPT | {"n_head": 8, "rotary_dim": 8}),  # q, v, k in four groups; own tables
    "gpt_neo": ("GPTNeoForCausalLM", PLAIN | LOCAL),  # attention in a module inside, every second layer local
    "bloom": ("BloomForCausalLM", PLAIN | {"n_layer": 2, "n_head": 6}),  # ALiBi, q, k, v by head, residuals inside
    "falcon": ("FalconForCausalLM", PLAIN | GROUPED),  # groups of heads with their k and v; two parallel norms
    "opt": ("OPTForCausalLM", PLAIN | OPT),  # projections around, norms behind, no final norm, positions from 2 on
    "apertus": ("ApertusForCausalLM", PLAIN),  # an activation with parameters
    "ministral3": ("Ministral3ForCausalLM", PLAIN | {"head_dim": 16, "rope_parameters": YARN}),  # queries that grow
}


def write_checkpoint(model_type: str, directory: Path) -> Any:
    architecture, options = DECODERS[model_type]
    cls = getattr(transformers, architecture)
    config = cls.config_class(**options)
    config.dtype = torch.float32
    model = cls(config).float().eval()
    randomise(model)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("model_type", DECODERS)
def test_scaffold_computes_what_transformers_does(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, plugin = tmp_path / "checkpoint", tmp_path / "plugin"
    reference = write_checkpoint(model_type, checkpoint)
    assert main(["enable", str(checkpoint), "--out", str(plugin)]) == 0, capsys.readouterr().out
    assert "bridge" not in (plugin / f"src/rtp_plugin_{model_type}/{model_type}.py").read_text()
    monkeypatch.syspath_prepend(plugin / "src")
    ids = torch.randint(3, 160, (60,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.no_grad():
        wanted = reference(torch.tensor([ids])).logits[0]
    options: dict[str, Any] = {"num_blocks": 16, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    with LLM(checkpoint, plugins=[f"rtp_plugin_{model_type}"], **options) as llm:
        error = float((llm.logits(ids) - wanted).abs().max() / wanted.std())
    assert error <= max(TOLERANCE, 3 * noise(reference, ids))


def test_a_scaffold_of_written_out_attention_passes_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reference without the attention interface, which adds residuals inside its blocks."""
    write_checkpoint("bloom", tmp_path / "checkpoint")
    assert main(["enable", str(tmp_path / "checkpoint"), "--out", str(tmp_path / "plugin")]) == 0
    monkeypatch.syspath_prepend(tmp_path / "plugin/src")
    capsys.readouterr()
    status = main(["check", str(tmp_path / "checkpoint"), "--plugin", "rtp_plugin_bloom", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (status, report["verdict"]) == (0, "MATCH"), report["failed"]


def _calls(scores: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[FunctionCall]:
    weights = scores.softmax(-1)
    return [
        FunctionCall("attn", "matmul", (q, k.transpose(2, 3)), q @ k.transpose(2, 3)),
        FunctionCall("attn", "softmax", (scores,), weights),
        FunctionCall("attn", "matmul", (weights, v), weights @ v),
    ]


def test_written_out_attention_is_told_by_its_scores() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 12, 8, generator=draw) for _ in range(3))
    hidden = torch.ones(12, 12).triu(1) * -1e9
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    plain = q @ k.transpose(2, 3) * 0.3 + hidden
    (found,) = written_out(_calls(plain + slopes[:, None, None] * torch.arange(12), q, k, v), [])
    assert found.options["scaling"] == pytest.approx(0.3, rel=1e-4)
    assert torch.allclose(found.options["slopes"], slopes, atol=1e-4)
    (found,) = written_out(_calls(plain, q, k, v), [])
    assert "slopes" not in found.options
    assert not list(written_out(_calls(torch.tanh(plain), q, k, v), []))
    assert not list(written_out(_calls(plain, q, k, v), ["attn"]))
