"""Doge with its attention and feed-forward blocks taken from transformers."""

from __future__ import annotations

from typing import Any

from bridged_model import BridgedForCausalLM, Doge, ScaledLayer, states, weights

from rtp_runtime.state import StateDescriptors
from rtp_runtime.weights import WeightDescriptors


class DogeForCausalLM(BridgedForCausalLM):
    names = Doge
    layer_class = ScaledLayer


def weight_descriptors(config: Any) -> WeightDescriptors:
    return weights(Doge, config, extra=("input_residual", "post_attention_residual"))


def state_descriptors(config: Any) -> StateDescriptors:
    return states(Doge, config)
