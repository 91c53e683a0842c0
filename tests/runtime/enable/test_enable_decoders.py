"""`rtp enable` on decoders: tiny random checkpoint, scaffold, and our logits and tokens against transformers'."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

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

MOE = {
    "num_hidden_layers": 3,
    "num_experts_per_tok": 3,
    "moe_num_experts": 8,
    "n_routed_experts": 8,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 80,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "position_embedding_type": "rope",
}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True}),
    "olmo": ("Olmo", {}),
    "olmo3": ("Olmo3", SLIDING | {"layer_types": KINDS}),
    "granite": ("Granite", MULTIPLIERS),
    "gemma2": ("Gemma2", SLIDING | {"head_dim": 16, "layer_types": KINDS, "query_pre_attn_scalar": 24}),
    "gemma3_text": ("Gemma3Text", SLIDING | {"head_dim": 16, "layer_types": KINDS}),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "cohere": ("Cohere", {"logit_scale": 0.0625}),
    "exaone4": ("Exaone4", SLIDING | {"layer_types": KINDS}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 16}),
    "seed_oss": ("SeedOss", {"head_dim": 24, "rope_parameters": YARN}),
    "mixtral": ("Mixtral", {"num_local_experts": 6}),
    "gpt_oss": ("GptOss", SLIDING | {"head_dim": 16, "layer_types": KINDS, "num_local_experts": 6}),
    "dots1": ("Dots1", MOE | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2}),
    "ernie4_5_moe": ("Ernie4_5_Moe", MOE | {"moe_layer_start_index": 1, "moe_num_shared_experts": 2, "moe_k": 3}),
    "granitemoehybrid": ("GraniteMoeHybrid", HYBRID),
}


@dataclass(frozen=True)
class Made:
    """A tiny checkpoint, the reference it is of, and the plugin that `rtp enable` wrote for it."""

    reference: Any
    checkpoint: Path
    plugin: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Enables each model type once for all tests."""

    @functools.cache
    def make(model_type: str) -> Made:
        folder = tmp_path_factory.mktemp(model_type)
        reference = write_checkpoint(*DECODERS[model_type], folder / "checkpoint")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            status = main(["enable", str(folder / "checkpoint"), "--out", str(folder / "plugin")])
        assert status == 0, out.getvalue()
        assert out.getvalue().splitlines()[-1] == str(folder / "plugin")
        return Made(reference, folder / "checkpoint", folder / "plugin")

    return make


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
    model_type: str, made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = made(model_type)
    monkeypatch.syspath_prepend(it.plugin / "src")
    ids = torch.randint(3, SIZES["vocab_size"], (60,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.no_grad():
        wanted = it.reference(torch.tensor([ids])).logits[0]
    with LLM(it.checkpoint, plugins=[f"rtp_plugin_{model_type}"], num_blocks=16, max_num_seqs=2) as llm:
        error = float((llm.logits(ids) - wanted).abs().max() / wanted.std())
    assert error <= max(TOLERANCE, 3 * noise(it.reference, ids))


def test_experts_load_apart_and_fused(
    made: Callable[[str], Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtral's hub has a tensor for each expert, under other names; transformers holds them in one."""
    it = made("mixtral")
    monkeypatch.syspath_prepend(it.plugin / "src")
    shutil.copy(it.checkpoint / "config.json", tmp_path)
    tensors = {name: tensor.clone() for name, tensor in it.reference.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids = list(range(3, 40))
    logits = []
    for checkpoint in (it.checkpoint, tmp_path):
        with LLM(checkpoint, plugins=["rtp_plugin_mixtral"], num_blocks=16, max_num_seqs=2) as llm:
            logits.append(llm.logits(ids))
    assert torch.equal(*logits)


CHECKED = ("gemma3_text", "phi3", "cohere", "gpt_oss")
"""Plain ones, those whose reference holds a module's values in a form of its own, and experts."""


@pytest.mark.parametrize("model_type", CHECKED)
def test_scaffold_passes_the_check_untouched(
    model_type: str, made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    it = made(model_type)
    monkeypatch.syspath_prepend(it.plugin / "src")
    capsys.readouterr()
    status = main(["check", str(it.checkpoint), "--plugin", f"rtp_plugin_{model_type}", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (status, report["verdict"]) == (0, "MATCH"), report["failed"]


FORMS = ("gemma3_text", "granite", "phi3", "phi", "exaone4", "mixtral", "gpt_oss", "dots1", "granitemoehybrid")
"""Several tables, factors, fused tensors, blocks of their own, experts, kinds of layers."""


def test_scaffolds_are_formatted_and_typed(made: Callable[[str], Made]) -> None:
    plugins = [made(model_type).plugin for model_type in FORMS]
    for plugin in plugins:
        for command in (["ruff", "check"], ["ruff", "format", "--check"]):
            run_tool([*command, "."], plugin)
    # From the root, whose cache of torch's types the type checker then shares.
    run_tool(["mypy", *(str(plugin / "src") for plugin in plugins)], Path(__file__).parents[3])


def test_rules_of_layers_and_experts_are_those_of_the_config(made: Callable[[str], Made]) -> None:
    """Numbers that are equal by chance at test size must not stand for each other."""
    dots, oss = (text(made(name).plugin) for name in ("dots1", "gpt_oss"))
    assert "if layer >= config.first_k_dense_replace" in dots or "if layer < config.first_k_dense_replace" in dots
    for line in ("groups=config.n_group", "top_groups=config.topk_group", "scale=config.routed_scaling_factor"):
        assert line in dots
    assert "window=config.sliding_window" in oss and "limit=config.swiglu_limit" in oss


def text(plugin: Path) -> str:
    return "".join(path.read_text() for path in sorted(plugin.glob("src/*/[a-z]*.py")))


def test_memory_and_work_follow_from_the_config_alone() -> None:
    """Mixtral 8x7B: 46.7 billion parameters, 12.9 of which a token meets; a gigabyte of keys for 8192 tokens."""
    from rtp_runtime.enable.estimates import estimate
    from rtp_runtime.enable.reference import meta_model
    from rtp_runtime.state import PagedState, StateDescriptors

    config = transformers.MixtralConfig()
    state = PagedState(axes={"kv": 2, "kv heads": 8, "head dim": 128})
    found = estimate(
        meta_model(transformers.MixtralForCausalLM, config), config, StateDescriptors([{"kv": state}] * 32)
    )
    assert (round(found.parameters / 1e9, 1), round(found.active_parameters / 1e9, 1)) == (46.7, 12.9)
    assert found.state is not None and found.state.per_token * 8192 == 2**30
    assert found.weight_bytes["bfloat16"] == 2 * found.parameters


def run_tool(command: list[str], folder: Path) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
