"""Small sizes of heads, of feed-forward blocks and of the model itself, by whichever names a config has for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEAD_DIM = 16
INTERMEDIATE = 112
WINDOW = 8
MAX_EXPERTS = 16

KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num")
HEAD_DIMS = ("head_dim", "kv_channels", "attention_head_size", "dim_head")
INNER = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "dff", "n_inner", "d_ff", "dim_ff", "intermediate_size_mlp")
WINDOWS = (
    "sliding_window",
    "window_size",
    "attention_window",
    "local_attention",
    "attention_chunk_size",
    "sliding_window_size",
)
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}


@dataclass(frozen=True)
class Widths:
    """The sizes that others follow from, before and after."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    full_head_dim: int
    full_hidden: int


def widths(config: Any, most_heads: int) -> Widths:
    """At most `most_heads` heads; shared keys stay shared, and a width that is not all heads' stays so."""
    heads = getattr(config, "num_attention_heads", None)
    hidden = config.hidden_size
    if heads is None:  # no attention at all
        return Widths(most_heads, most_heads, HEAD_DIM, most_heads * HEAD_DIM, HEAD_DIM, hidden)
    kv_heads = next((value for key in KV_HEADS if (value := getattr(config, key, None))), heads)
    head_dim = next((value for key in HEAD_DIMS if (value := getattr(config, key, None))), hidden // heads)
    small_heads = heads if heads < 2 else most_heads
    small_kv = heads if heads < 2 else most_heads if kv_heads == heads else min(kv_heads, 2)
    small_dim = head_dim if _needs_head_dim(config, head_dim) else HEAD_DIM
    inner = small_heads * small_dim
    # A model whose heads do not add up to its width must stay such a model.
    small_hidden = inner if heads * head_dim == hidden else inner + 32
    return Widths(small_heads, small_kv, small_dim, small_hidden, head_dim, hidden)


def _needs_head_dim(config: Any, head_dim: int) -> bool:
    """Whether rotary parameters are tied to this head dim: a factor per frequency, or a share that is not even."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    for parameters in nested or [rope]:
        share = parameters.get("partial_rotary_factor", 1.0) or 1.0
        if int(HEAD_DIM * share) % 2 or any(isinstance(value, list) for value in parameters.values()):
            return True
    return head_dim < HEAD_DIM


def block_sizes(values: Mapping[str, Any], sizes: Widths) -> dict[str, int]:
    """Key -> small size, of those keys of a config's `values` that hold an integer."""
    found = dict.fromkeys(KV_HEADS, sizes.kv_heads) | dict.fromkeys(HEAD_DIMS, sizes.head_dim)
    found |= dict.fromkeys(INNER, INTERMEDIATE) | dict.fromkeys(WINDOWS, WINDOW)
    found |= _other_widths(values, sizes)
    if values.get("kv_lora_rank"):
        found |= LATENT | {"qk_head_dim": LATENT["qk_nope_head_dim"] + LATENT["qk_rope_head_dim"]}
        found["head_dim"] = LATENT["qk_rope_head_dim"]
    return {key: size for key, size in found.items() if values.get(key) and isinstance(values[key], int)}


def _other_widths(values: Mapping[str, Any], sizes: Widths) -> dict[str, int]:
    found: dict[str, int] = {}
    for step, key in enumerate(key for key in values if re.search(r"_(intermediate|ffn_hidden)_size$", key)):
        found[key] = INTERMEDIATE - 16 * (step % 4 + 1)
    if rotary := values.get("rotary_dim"):
        found["rotary_dim"] = max(2, 2 * (rotary * sizes.head_dim // sizes.full_head_dim // 2))
    if width := values.get("word_embed_proj_dim"):
        found["word_embed_proj_dim"] = sizes.hidden if width == sizes.full_hidden else sizes.hidden // 2 + 8
    if value_dim := values.get("v_head_dim"):
        found["v_head_dim"] = max(2, 2 * (value_dim * sizes.head_dim // sizes.full_head_dim // 2))
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if (values.get(key) or 0) > MAX_EXPERTS:
            found[key] = MAX_EXPERTS
    return found
