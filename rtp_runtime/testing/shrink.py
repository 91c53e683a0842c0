"""Cuts the config of any transformers decoder down to test size without changing what it computes.

Widths, counts of heads, the vocabulary and windows shrink; everything that switches or scales a computation stays.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from rtp_runtime.testing.shrink_state_space import state_space_sizes

VOCABULARY = 192
HEAD_DIM = 16
INTERMEDIATE = 112
WINDOW = 8
CONTEXT = 512
ORIGINAL_CONTEXT = 16
"""What a rope scaled from a shorter context believes that one was: short, so that the scaling shows."""


def shrink_config(config: Any, layers: int | None = None) -> Any:
    """A small twin of a transformers `config` of the same class.

    Args:
        config: any text decoder's config object.
        layers: keep this many layers; None keeps the shortest run from the first layer that shows every kind of layer
            that the config's per-layer lists tell apart, and at least two.
    """
    values = {
        key: copy.deepcopy(value)
        for key, value in config.to_dict().items()
        if key not in ("quantization_config", "transformers_version", "_name_or_path", "dtype")
    }
    depth = layers if layers is not None else covering_depth(values)
    heads, kv_heads, head_dim, hidden = _attention_sizes(config)
    wanted = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCABULARY,
        "sliding_window": WINDOW,
        "num_hidden_layers": depth,
    }
    wanted |= state_space_sizes(values, hidden)
    _cut_lists(values, depth)
    for name, value in wanted.items():
        key = config.attribute_map.get(name, name)
        if values.get(key) is not None:
            values[key] = value
    _keep_ids_in_vocabulary(values)
    _shorten_context(values)
    small = type(config).from_dict(values)
    small.dtype = "float32"
    return small


def covering_depth(values: Mapping[str, Any]) -> int:
    """The fewest leading layers, at least two, that show every kind of layer in the per-layer lists of a config."""
    total: int = values["num_hidden_layers"] if "num_hidden_layers" in values else values.get("n_layer", 2)
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == total]
    kinds = list(zip(*lists, strict=True)) if lists else [()] * total
    seen: set[str] = set()
    depth = 0
    for layer, kind in enumerate(kinds):
        if repr(kind) not in seen:
            seen.add(repr(kind))
            depth = layer + 1
    return min(max(depth, 2), total)


def _attention_sizes(config: Any) -> tuple[int, int, int, int]:
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:  # no attention at all
        return 4, 4, HEAD_DIM, 4 * HEAD_DIM
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    small_kv = heads if heads < 2 else 4 if kv_heads == heads else min(kv_heads, 2)
    small_heads = heads if heads < 2 else 4
    small_dim = head_dim if _needs_head_dim(config, head_dim) else HEAD_DIM
    inner = small_heads * small_dim
    # A model whose heads do not add up to its width must stay such a model.
    hidden = inner if heads * head_dim == config.hidden_size else inner + 32
    return small_heads, small_kv, small_dim, hidden


def _needs_head_dim(config: Any, head_dim: int) -> bool:
    """Whether rotary parameters are tied to this head dim: a factor per frequency, or a share that is not even."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    for parameters in nested or [rope]:
        share = parameters.get("partial_rotary_factor", 1.0) or 1.0
        if int(HEAD_DIM * share) % 2 or any(isinstance(value, list) for value in parameters.values()):
            return True
    return head_dim < HEAD_DIM


def _cut_lists(values: dict[str, Any], depth: int) -> None:
    total = values.get("num_hidden_layers")
    for key, value in values.items():
        if isinstance(value, list) and len(value) == total:
            values[key] = value[:depth]


def _keep_ids_in_vocabulary(values: dict[str, Any]) -> None:
    for key, value in values.items():
        if key.endswith("_token_id") and value is not None:
            ids = value if isinstance(value, list) else [value]
            kept = [token % VOCABULARY for token in ids]
            values[key] = kept if isinstance(value, list) else kept[0]


def _shorten_context(values: dict[str, Any]) -> None:
    for key, value in values.items():
        if (isinstance(value, dict) and key.startswith("rope_")) or (isinstance(value, dict) and "rope_type" in value):
            _shorten_context(value)
        elif key == "original_max_position_embeddings" and value:
            values[key] = ORIGINAL_CONTEXT
        elif key == "max_position_embeddings" and value:
            values[key] = min(value, CONTEXT)
