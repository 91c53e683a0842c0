"""Mistral, of which every layer has a window, with attention and feed-forward blocks taken from transformers."""

from __future__ import annotations

from typing import Any

from bridged_model import BridgedForCausalLM, Mistral, states, weights

from rtp_runtime.state import StateDescriptors
from rtp_runtime.weights import WeightDescriptors


class MistralForCausalLM(BridgedForCausalLM):
    names = Mistral


def weight_descriptors(config: Any) -> WeightDescriptors:
    return weights(Mistral, config)


def state_descriptors(config: Any) -> StateDescriptors:
    return states(Mistral, config)
