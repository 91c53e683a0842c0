"""Config keys that decide something in the reference and that a model file may not read."""

from __future__ import annotations

import re
from typing import Any

from rtp_runtime.enable.reference import Reference

NEUTRAL = re.compile(
    r"_.*|.*dropout|.*pdrop|.*_token_id|output_.*|.*_loss.*|initializer.*|dtype|use_cache|pad_.*|vocab_size|num_hidden_layers"
    r"|max_position_embeddings|rope_parameters|gradient.*|use_return_dict|return_dict|.*jitter.*|.*aux_loss.*|experts_implementation"
)
"""Read for training, for sizes, or for what other parts of the model file read."""

SIZES = ("hidden_size", "num_attention_heads")
"""Read by every model file, under these names."""


def find_pins(reference: Reference, config: Any) -> dict[str, object]:
    """Key -> its value in the full config: switches that the modeling file reads, sizes left out.

    A list stands for its distinct values.
    """
    pins: dict[str, object] = {"tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False))}
    names = {own: usual for usual, own in config.attribute_map.items()}
    for key in reference.reads:
        value, small = getattr(config, key, None), getattr(reference.config, key, None)
        usual = names.get(key, key)
        if NEUTRAL.fullmatch(usual) or usual in SIZES or key in config.attribute_map:
            continue
        if isinstance(value, list) and all(isinstance(item, str | int) for item in value):
            pins[key] = sorted(set(value))
        elif (value is None or isinstance(value, str | int | float)) and value == small:
            pins[key] = value
    return pins
