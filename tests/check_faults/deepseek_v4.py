"""Copies of the DeepSeek-V4 model with one fault each."""

from __future__ import annotations

from typing import Any

from rtp_plugin_deepseek.deepseek_v4 import DeepseekV4ForCausalLM, state_descriptors, weight_descriptors

from rtp_kernel.batch import Build
from rtp_kernel.components import Rotary

__all__ = ["state_descriptors", "weight_descriptors"]


class NotTurnedBack(Rotary):
    """The rotation of attention's output, the only one by negative angles, left out."""

    def one(self, x: Any, cos: Any, sin: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return x if self.calls % 3 == 0 else super().one(x, cos, sin)


class NoInverseRotary(DeepseekV4ForCausalLM):
    """Values stay turned."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[0].self_attn.rotary = NotTurnedBack("interleaved")


class FewIterations(DeepseekV4ForCausalLM):
    """One step of Sinkhorn and Knopp fewer in one place."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.model.layers[2].ffn_hc._options["iterations"] = 3
