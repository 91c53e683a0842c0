"""DeepSeek-V4 against transformers: kinds of layers, sizes that divide nothing, three sets of names, older configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rtp_runtime.errors import RtpError
from rtp_runtime.model import load_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.compare import Case, assert_export_complete, assert_logits_match, check_tiny
from rtp_runtime.testing.tiny_models import rope, write_tiny

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


def layers(*types: str, hashed: int = 0) -> dict[str, Any]:
    """A model of these kinds of layers, of which the first `hashed` route by token ids."""
    kinds = ["hash_moe"] * hashed + ["moe"] * (len(types) - hashed)
    return {"num_hidden_layers": len(types), "layer_types": list(types), "mlp_layer_types": kinds}


def rates(csa: int, hca: int) -> dict[str, int]:
    return {CSA: csa, HCA: hca}


YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "every kind of layer": {},
    "one sliding layer": layers(SLIDING),
    "one CSA layer": layers(CSA),
    "one HCA layer": {**layers(HCA, hashed=1), "compress_rates": {HCA: 8}},
    "a window that is no multiple of the rates, two streams": {
        "sliding_window": 7,
        "compress_rates": rates(2, 5),
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "hc_eps": 1e-3,
    },
    "rates 3 and 5, a window of two tokens, one entry selected": {
        "sliding_window": 2,
        "compress_rates": rates(3, 5),
        "index_topk": 1,
    },
    "an entry for each token, one stream": {
        **layers(CSA, HCA),
        "compress_rates": rates(1, 1),
        "hc_mult": 1,
        "hc_sinkhorn_iters": 1,
    },
    "windows longer than most prompts, more selected than there is": {
        "compress_rates": rates(16, 64),
        "sliding_window": 100,
        "index_topk": 200,
    },
    "odd sizes": {
        "num_attention_heads": 3,
        "o_groups": 3,
        "vocab_size": 391,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 18,
        "index_n_heads": 17,
    },
    "one group, no tables of token ids, a head that is the embedding": {
        **layers(HCA, CSA, SLIDING),
        "o_groups": 1,
        "tie_word_embeddings": True,
    },
    "sigmoid scores, biases, no clamp in reach": {
        **layers(CSA, SLIDING, hashed=1),
        "scoring_func": "sigmoid",
        "mlp_bias": True,
        "swiglu_limit": 1e4,
    },
    "plain angles, the whole head turned": {
        **layers(CSA, SLIDING, HCA, hashed=3),
        "partial_rotary_factor": 1.0,
        "qk_rope_head_dim": 32,
        "index_head_dim": 32,
        "rope_parameters": None,
    },
    "rotary numbers by kind, of which yarn's scale the angles": {
        **layers(HCA, SLIDING, CSA),
        "rope_parameters": {
            "main": rope(500.0, partial_rotary_factor=0.25),
            "compress": rope(2000.0, **YARN, partial_rotary_factor=0.5) | {"rope_type": "yarn"},
        },
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_matches_transformers(variant: str) -> None:
    check_tiny("deepseek_v4", seed=len(variant), **VARIANTS[variant])


def released(name: str) -> str:
    """The hub's name of a tensor that transformers saved."""
    name = name.replace("attn.norm.", "attn.kv_norm.").replace("hc_head.hc_", "hc_head_")
    return name.removeprefix("model.").replace("embed_tokens", "embed")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model under the names that transformers saves, holds in memory, and that the hub's files have."""
    saved = tmp_path_factory.mktemp("saved")
    model = write_tiny("deepseek_v4", saved)
    tensors = load_file(saved / "model.safetensors")
    drafting = {"mtp.0.attn.wq_a.weight": torch.randn(3, 2), "mtp.0.hc_head_scale": torch.randn(1)}
    forms = {
        "hub": {released(name): tensor for name, tensor in tensors.items()} | drafting,
        "memory": {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
    }
    directories = {"saved": saved}
    for form, content in forms.items():
        directories[form] = tmp_path_factory.mktemp(form)
        save_file(content, directories[form] / "model.safetensors", metadata={"format": "pt"})
        (directories[form] / "config.json").write_text((saved / "config.json").read_text())
    return directories


def load(directory: Path) -> Any:
    return load_model(directory, dtype="float32", plugins=load_plugins())


@pytest.mark.parametrize("form", ["hub", "memory"])
def test_other_names_load_to_the_same_parameters(checkpoints: dict[str, Path], form: str) -> None:
    first, second = (load(checkpoints[each]).module.state_dict() for each in ("saved", form))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_hub_names_are_those_that_transformers_loads(checkpoints: dict[str, Path]) -> None:
    names = load_file(checkpoints["hub"] / "model.safetensors")
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.0.attn.kv_norm.weight"} <= names.keys()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        found, wanted = (
            AutoModelForCausalLM.from_pretrained(checkpoints[form], dtype=torch.float32)(ids).logits
            for form in ("hub", "saved")
        )
    assert torch.equal(found, wanted)


def test_the_hub_form_serves_and_is_exported(checkpoints: dict[str, Path]) -> None:
    case = Case.load(checkpoints["hub"])
    assert_export_complete(case)
    with case.engine() as llm:
        assert_logits_match(case, llm, "hub names")


def test_older_configs_mean_the_same(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Ratios and layers by number, rotary numbers flat, as in the files of the first release."""
    config = json.loads((checkpoints["saved"] / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor"):
        del config[key]
    config |= {
        "compress_ratios": [0, 0, 4, 128, 4],
        "compress_rate_hca": 8,
        "num_hash_layers": 2,
        "rope_scaling": {"type": "yarn", **YARN},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").hardlink_to(checkpoints["saved"] / "model.safetensors")
    case = Case.load(tmp_path)
    with case.engine() as llm:
        assert_logits_match(case, llm, "an older config")


def test_what_the_reference_keeps_in_float32_is_float32_in_bfloat16(checkpoints: dict[str, Path]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(checkpoints["saved"], dtype=torch.bfloat16).state_dict()
    loaded = load_model(checkpoints["saved"], dtype="bfloat16", plugins=load_plugins()).module
    ours: dict[str, Tensor] = loaded.state_dict()
    same = [name for name in ours if name in reference]
    assert {name: ours[name].dtype for name in same} == {name: reference[name].dtype for name in same}
    assert {ours[name].dtype for name in same} == {torch.float32, torch.bfloat16, torch.int64}
    assert all(torch.equal(ours[name], reference[name]) for name in same)


@pytest.mark.parametrize(
    ("change", "problem"),
    [({"scoring_func": "relu"}, 'scoring_func is "relu"'), ({"o_groups": 5}, "o_groups is 5, which does not divide")],
)
def test_what_is_not_computed_is_declined(
    checkpoints: dict[str, Path], tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    config = json.loads((checkpoints["saved"] / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").hardlink_to(checkpoints["saved"] / "model.safetensors")
    with pytest.raises(RtpError, match=problem):
        load(tmp_path)
