"""Qwen3-Next with attention, gated delta net and experts taken from transformers."""

from __future__ import annotations

from typing import Any

from bridged_model import BridgedForCausalLM, Qwen3Next, states, weights

from rtp_runtime.state import StateDescriptors
from rtp_runtime.weights import WeightDescriptors


class Qwen3NextForCausalLM(BridgedForCausalLM):
    names = Qwen3Next


def weight_descriptors(config: Any) -> WeightDescriptors:
    return weights(Qwen3Next, config)


def state_descriptors(config: Any) -> StateDescriptors:
    return states(Qwen3Next, config)
