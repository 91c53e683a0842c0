"""Feed-forward blocks, gated or plain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rtp_runtime.enable.blocks.base import Block
from rtp_runtime.enable.blocks.norm import Norm
from rtp_runtime.enable.blocks.packing import declare_parts
from rtp_runtime.enable.blocks.projection import Projection
from rtp_runtime.enable.code import call
from rtp_runtime.enable.declarations import Place


@dataclass(frozen=True)
class Mlp(Block):
    """Gated (gate, up, down), or plain (up, down)."""

    class_name: str
    activation: str
    """Code over `config`, or a quoted name."""
    up: Projection
    down: Projection
    gate: Projection | None = None
    width: str = "config.intermediate_size"
    inner_norm: tuple[str, Norm] | None = None
    """Attribute name and norm of what the last projection is given."""
    learned: str | None = None
    """Attribute name of an activation with parameters (`XIELU`)."""
    residual: bool = False
    """It adds its result to a residual that it is handed."""
    word: ClassVar[str] = "feed_forward"

    @property
    def fused(self) -> bool:
        return self.gate is not None and self.gate.name == self.up.name

    @property
    def is_component(self) -> bool:
        """Whether GatedMLP says it all: gated, with its names and its single bias."""
        biases = {part.bias for part in (self.gate, self.up, self.down) if part is not None}
        names = self.fused and self.up.name == "gate_up_proj" and self.gate is not None and self.gate.start == 0
        apart = self.gate is not None and (self.gate.name, self.up.name) == ("gate_proj", "up_proj")
        plain = self.inner_norm is None and self.learned is None
        return plain and (names or apart) and self.down.name == "down_proj" and len(biases) == 1

    @property
    def sequential(self) -> bool:
        """Whether the reference has it as numbered modules: projection, activation, projection."""
        return self.gate is None and (self.up.name, self.down.name) == ("0", "2")

    def make(self) -> str:
        if self.sequential:
            up = f"Linear(config.hidden_size, {self.width}{self.up.bias_code})"
            down = f"Linear({self.width}, config.hidden_size{self.down.bias_code})"
            return f"nn.Sequential({up}, Activation({self.activation}), {down})"
        if not self.is_component:
            return super().make()
        return f"GatedMLP(config.hidden_size, {self.width}, {self.activation}{self.up.bias_code})"

    def source(self) -> list[str]:
        if self.is_component or self.sequential:
            return []
        body = self._init()
        if self.inner_norm is not None:
            body.append(f"self.{self.inner_norm[0]} = {self.inner_norm[1].over(self.width)}")
        body.append(f"self.{self.learned} = XIELU()" if self.learned else f"self.activation = {self.activation}")
        return [
            f"class {self.class_name}(nn.Module):",
            "    def __init__(self, config: Any) -> None:",
            *(f"        {line}" for line in ("super().__init__()", *body)),
            "",
            f"    def forward(self, hidden: Tensor{', residual: Tensor' if self.residual else ''}) -> Tensor:",
            *(
                f"        {line}"
                for line in (*self._forward(), f"return {'residual + ' if self.residual else ''}output")
            ),
        ]

    def _init(self) -> list[str]:
        if self.gate is None:
            first = [f"self.{self.up.name} = Linear(config.hidden_size, {self.width}{self.up.bias_code})"]
        else:
            names = ("gate_proj", "up_proj") if self.fused else (self.gate.name, self.up.name)
            parts = f'{{"{names[0]}": {self.width}, "{names[1]}": {self.width}}}'
            biased = ["bias=True"] if self.up.bias else []
            first = call("self.gate_up_proj = MergedLinear(", ["config.hidden_size", parts, *biased])
        return [*first, f"self.{self.down.name} = Linear({self.width}, config.hidden_size{self.down.bias_code})"]

    def _forward(self) -> list[str]:
        if self.gate is None:
            first, up = [], f"self.{self.up.name}(hidden)"
            inner = f"self.{self.learned}({up})" if self.learned else f"activation({up}, self.activation)"
        else:
            first, inner = ["gate, up = self.gate_up_proj(hidden)"], "gated_activation(gate, up, self.activation)"
            inner = f"self.{self.learned}(gate) * up" if self.learned else inner
        if self.inner_norm is not None:
            inner = f"self.{self.inner_norm[0]}({inner})"
        return [*first, f"output: Tensor = self.{self.down.name}({inner})"]

    def declare(self, place: Place) -> None:
        intermediate = place.axis("intermediate", "intermediate", self.width)
        if self.gate is None:
            self.up.declare(place, intermediate, "hidden")
        else:
            declare_parts(place, "gate_up_proj", [self.gate, self.up], [intermediate, intermediate])
        self.down.declare(place, "hidden", intermediate)
        if self.inner_norm is not None:
            self.inner_norm[1].declare_over(place.child(self.inner_norm[0]), intermediate)
        if self.learned is not None:
            for name, size in (("alpha_p", "1"), ("alpha_n", "1"), ("beta", ""), ("eps", "")):
                place.child(self.learned).weight(name, *([size] if size else []))

    def describe(self) -> str:
        form = f"{self.down.name}({self.activation}({self.up.name}))"
        if self.gate is not None:
            names = "halves of " + self.up.name if self.fused else f"{self.gate.name} and {self.up.name}"
            form = f"gated by {self.activation}, {names}"
        if self.inner_norm is not None:
            form += f", {self.inner_norm[1].describe()} before {self.down.name}"
        return form + (", with biases" if self.up.bias or self.down.bias else "")
