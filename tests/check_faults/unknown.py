"""Mistakes that the catalogue of causes does not hold: the checker must flag them, and name no cause."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from rtp_plugin_qwen.qwen3 import Qwen3ForCausalLM, state_descriptors, weight_descriptors
from torch import Tensor, nn

from check_faults.catalogue import Fault
from rtp_kernel.batch import Build
from rtp_kernel.components import GatedMLP

__all__ = ["UNKNOWN", "state_descriptors", "weight_descriptors"]


class RipplingMLP(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        return output + 0.01 * torch.sin(40 * output)


class Ripples(Qwen3ForCausalLM):
    """A wave on top of what the feed-forward network gives."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[2].mlp = RipplingMLP(config.hidden_size, config.intermediate_size, config.hidden_act)


class RememberingMLP(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x + 0.03 * x.roll(1, 0).abs())
        return output


class Memory(Qwen3ForCausalLM):
    """A feed-forward network that knows the token before."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[1].mlp = RememberingMLP(config.hidden_size, config.intermediate_size, config.hidden_act)


class TiltedHeads(nn.Module):
    """Each head's result tilted a little, the more the larger it is."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.inner = attention

    def forward(self, *args: Any) -> Tensor:
        output: Tensor = self.inner(*args)
        return output + 0.02 * output * output.abs().roll(1, -1)


class Tilted(Qwen3ForCausalLM):
    """An attention that is not linear in its values."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        layer = self.model.layers[0].self_attn
        layer.attn = TiltedHeads(layer.attn)


qwen3 = partial(Fault, base="qwen3", stage="probes", row="a mistake of no known kind")

UNKNOWN = (
    qwen3("ripples", at="2.mlp", effect=0.0143, model="unknown:Ripples"),
    qwen3("memory", at="1.mlp", effect=0.0496, model="unknown:Memory"),
    qwen3("tilted", at="0.self_attn", effect=0.0138, model="unknown:Tilted"),
)
