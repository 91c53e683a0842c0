"""Cuts the config of any transformers decoder down to test size without changing what it computes.

Widths, counts of heads, the vocabulary and windows shrink; everything that switches or scales a computation stays.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from rtp_runtime.testing.shrink_attention import block_sizes, widths
from rtp_runtime.testing.shrink_state_space import state_space_sizes

VOCABULARY = 192
CONTEXT = 512
ORIGINAL_CONTEXT = 14
"""What a rope scaled from a shorter context believes that one was: short, so that the scaling shows."""


def shrink_config(config: Any, layers: int | None = None, heads: int = 4) -> Any:
    """A small twin of a transformers `config` of the same class.

    Args:
        config: any text decoder's config object.
        layers: keep this many layers; None keeps the shortest run from the first layer that shows every kind of layer
            that the config's per-layer lists tell apart, and at least two.
        heads: how many heads are left where there are two or more.
    """
    values = {
        key: copy.deepcopy(value)
        for key, value in config.to_dict().items()
        if key not in ("quantization_config", "transformers_version", "_name_or_path", "dtype")
    }
    layers_key = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    depth = layers if layers is not None else covering_depth(values, layers_key)
    sizes = widths(config, heads)
    wanted = {
        "num_attention_heads": sizes.heads,
        "hidden_size": sizes.hidden,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": depth,
    }
    wanted |= block_sizes(values, sizes) | state_space_sizes(values, sizes.hidden)
    _cut_lists(values, depth, values.get(layers_key))
    for name, value in wanted.items():
        key = config.attribute_map.get(name, name)
        if values.get(key) is not None:
            values[key] = value
    _keep_ids_in_vocabulary(values)
    _shorten_context(values)
    small = type(config).from_dict(values)
    small.dtype = "float32"
    return small


def covering_depth(values: Mapping[str, Any], key: str = "num_hidden_layers") -> int:
    """The fewest leading layers, at least two, that show every kind of layer in the per-layer lists of a config.

    `key`: what the config calls its number of layers.
    """
    total: int = values.get(key) or values.get("n_layer") or 2
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == total]
    kinds = list(zip(*lists, strict=True)) if lists else [()] * total
    seen: set[str] = set()
    depth = 0
    for layer, kind in enumerate(kinds):
        if repr(kind) not in seen:
            seen.add(repr(kind))
            depth = layer + 1
    return min(max(depth, 2, _period(values, total)), total)


PERIOD = re.compile(
    r".*(period|interval|sparse_step|_freq|every.*|layer_pattern|first_k_dense_replace|num_dense_layers)"
)


def _period(values: Mapping[str, Any], total: int) -> int:
    """Layers until every kind has come whose places are counted: each nth one, or those after the first few."""
    found = 0
    for key, value in values.items():
        if PERIOD.fullmatch(key) and isinstance(value, int) and not isinstance(value, bool) and value < total:
            found = max(found, value + 1 if "dense" in key else value)
    return found


def _cut_lists(values: dict[str, Any], depth: int, total: int | None) -> None:
    for key, value in values.items():
        if isinstance(value, list) and len(value) == total and key != "attention_types":
            values[key] = value[:depth]
    if values.get("attention_types"):  # runs: [[[kind, …], repeats], …]
        kinds = [kind for run, repeats in values["attention_types"] for _ in range(repeats) for kind in run]
        values["attention_types"] = [[kinds[:depth], 1]]


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
        elif key in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len") and value:
            values[key] = min(value, CONTEXT)
