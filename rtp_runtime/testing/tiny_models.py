"""Tiny random checkpoints in float32, written by transformers itself under the names the hub uses.

Every parameter is redrawn: at transformers' own initial values (norms at 1, biases at 0) an implementation that forgets
a norm weight or a bias would still match.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB_SIZE = 384

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def rope(theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    """Rotary parameters in the nested form of current configs."""
    return {"rope_type": "default", "rope_theta": theta, **more}


def qwen2() -> dict[str, Any]:
    """Full and sliding layers, q/k/v biases, tied head."""
    return COMMON | {
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
        "rope_parameters": rope(1e6),
    }


def qwen2_moe() -> dict[str, Any]:
    """Routed layers around a dense one, a shared expert behind a sigmoid gate, weights not renormalised."""
    return COMMON | {
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
        "rope_parameters": rope(1e6),
    }


def qwen3() -> dict[str, Any]:
    """Norms on q and k, a head dim that is not hidden / heads, tied head."""
    return COMMON | {
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "rope_parameters": rope(1e6),
    }


def qwen3_moe() -> dict[str, Any]:
    """Routed layers around a dense one, weights renormalised."""
    return COMMON | {
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "rope_parameters": rope(1e6),
    }


def tiny_configs() -> dict[str, tuple[str, Callable[[], dict[str, Any]]]]:
    """Name -> (the prefix of transformers' config and model classes, the config's values)."""
    return {
        "qwen2": ("Qwen2", qwen2),
        "qwen2_moe": ("Qwen2Moe", qwen2_moe),
        "qwen3": ("Qwen3", qwen3),
        "qwen3_moe": ("Qwen3Moe", qwen3_moe),
    }


def build_tiny(name: str, seed: int = 0, **overrides: Any) -> Any:
    """The transformers model `name` (`TINY_NAMES`) in memory, in eval mode; `overrides` replace config values."""
    import transformers

    prefix, values = tiny_configs()[name]
    config = getattr(transformers, f"{prefix}Config")(**(values() | overrides))
    config.dtype = "float32"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
    return randomise(model, seed)


def write_tiny(
    name: str, directory: str | Path, seed: int = 0, *, max_shard_size: str | int = "50GB", **overrides: Any
) -> Any:
    """`build_tiny`, saved as a checkpoint in `directory`; returns the model in memory as the reference."""
    model = build_tiny(name, seed, **overrides)
    Path(directory).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


@torch.no_grad()
def randomise(model: Any, seed: int = 0) -> Any:
    """Redraw every parameter and the buffers that hold values of a checkpoint, so that faults show.

    Embeddings are small (std 0.02): an eps then matters, and a tied head does not simply repeat its input. Queries are
    scaled up so that attention is not flat. Router biases sit around 8, where bfloat16 would round them together. In
    layer 1 the low-rank projections are small, which makes their norms' own eps visible.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(_draw(name, parameter, generator))
    for name, buffer in model.named_buffers():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "e_score_correction_bias":
            buffer.copy_(8 + _normal(buffer, 0.2, generator))
        elif leaf == "tid2eid":
            experts = model.config.get_text_config().n_routed_experts
            rows = [torch.randperm(experts, generator=generator)[: buffer.shape[1]] for _ in range(buffer.shape[0])]
            buffer.copy_(torch.stack(rows))
    return model


def _normal(like: Tensor, std: float, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator).to(like.dtype) * std


def _draw(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "A_log":
        return torch.log(torch.rand(parameter.shape, generator=generator) * 4 + 0.5)
    if leaf == "dt_bias":
        return _normal(parameter, 0.5, generator)
    if leaf in ("hc_scale", "scale"):
        return 1 + _normal(parameter, 0.1, generator)
    if leaf == "e_score_correction_bias":
        return 8 + _normal(parameter, 0.2, generator)
    if parameter.ndim == 1:
        return parameter + _normal(parameter, 0.2, generator)
    if "conv1d" in name:
        return _normal(parameter, 0.3, generator)
    if "embed_tokens" in name or "ngram_embedding" in name:
        return _normal(parameter, 0.02, generator)
    module = name.split(".")[-2]
    gain = 2.0 if leaf == "weight" and module in ("q_proj", "q_b_proj") else 1.0
    drawn = _normal(parameter, parameter.shape[-1] ** -0.5 * gain, generator)
    return drawn * 0.03 if ".layers.1." in name and module in ("q_a_proj", "kv_a_proj_with_mqa") else drawn


TINY_NAMES = tuple(tiny_configs())
