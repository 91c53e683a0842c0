"""The Qwen3-Next model with recurrent states that follow the cache's dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rtp_plugin_qwen.qwen3_next import Qwen3NextForCausalLM, weight_descriptors
from rtp_plugin_qwen.qwen3_next import state_descriptors as right

from rtp_runtime.state import StateDescriptors

__all__ = ["Qwen3NextForCausalLM", "state_descriptors", "weight_descriptors"]


def state_descriptors(config: Any) -> StateDescriptors:
    """Each in the cache's dtype, where the recurrence's is to be float32."""
    layers = right(config)
    return StateDescriptors(
        [{name: replace(state, dtype="cache") for name, state in layers[place].items()} for place in range(len(layers))]
    )
