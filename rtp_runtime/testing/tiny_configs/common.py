"""What the configs of the tiny checkpoints have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

VOCAB_SIZE: Final = 384

COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class Tiny:
    """One tiny checkpoint: transformers' classes and the config's values."""

    model: str
    config: str
    text: dict[str, Any]
    """Of the language model, which is the whole config where there is no vision part."""
    vision: dict[str, Any] | None = None
    outer: dict[str, Any] = field(default_factory=dict)
    """Of the config around both parts."""
    module: str = ""
    """Module under transformers.models that has the classes, where the package itself does not export them."""


def rope(theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    """Rotary parameters in the nested form of current configs."""
    return {"rope_type": "default", "rope_theta": theta, **more}


def yarn(mscale: float) -> dict[str, Any]:
    lengths = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1}
    return {"rope_type": "yarn", "rope_theta": 10000.0, **lengths, "mscale": mscale, "mscale_all_dim": mscale}


def text(layers: int, **more: Any) -> dict[str, Any]:
    return COMMON | {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2} | more


def mla(layers: int, **more: Any) -> dict[str, Any]:
    ranks = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
    return text(layers, num_key_value_heads=4, **ranks) | more


EXPERTS: Final[dict[str, Any]] = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
ROUTED: Final[dict[str, Any]] = {"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2}
DELTA: Final[dict[str, Any]] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MROPE: Final[dict[str, Any]] = {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
MEDIA: Final[dict[str, Any]] = {
    "image_token_id": VOCAB_SIZE - 1,
    "video_token_id": VOCAB_SIZE - 2,
    "vision_start_token_id": VOCAB_SIZE - 3,
    "vision_end_token_id": VOCAB_SIZE - 4,
}
VIT: Final[dict[str, Any]] = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4}
