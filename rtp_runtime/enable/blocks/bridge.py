"""Blocks that a model file takes from transformers, because they are none of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rtp_runtime.enable.blocks.base import BY_LAYER, Block, ByLayer, code_of, values_of
from rtp_runtime.enable.code import WIDTH, call, literal, nested
from rtp_runtime.enable.declarations import Place


def constant(class_name: str) -> str:
    """The name of the constant that holds a target: "DogeAttention" -> "DOGE_ATTENTION"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", class_name).upper()


@dataclass(frozen=True)
class Bridge(Block):
    """A block without state."""

    class_name: str
    target: str
    reads: frozenset[str] = frozenset()
    """Config keys that its own code reads: the model file need not."""
    wants_layer: bool = False
    renames: tuple[tuple[str, str], ...] = ()
    """Names inside it, and what checkpoints call them."""
    parts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Parameters, and the tensors that checkpoints hold in their place."""
    hub: str | None = None
    """What checkpoints call the block."""
    word: ClassVar[str] = "bridged"

    @property
    def constant(self) -> str:
        return constant(self.class_name)

    def by_layer(self) -> bool:
        return self.wants_layer

    @property
    def targets(self) -> Mapping[str, str]:
        """The constants that its code uses, and what they hold."""
        return {self.constant: self.target}

    def make(self) -> str:
        return f"BridgedBlock({self.constant}, config{', layer' if self.wants_layer else ''})"

    def declare(self, place: Place) -> None:
        layer = ["0"] if self.wants_layer else []
        given = [self.constant, "config", *layer, f'prefix={place.prefix}{place.name}."', f"over={place.over}"]
        if self.renames:
            given.append(nested("renames={", [f'"{name}": "{other}"' for name, other in self.renames], "}", indent=12))
        if self.parts:
            parts = [f'"{name}": {literals(others)}' for name, others in self.parts]
            given.append(nested("parts={", parts, "}", indent=12))
        given += [f'hub={place.prefix}{self.hub}."'] if self.hub else []
        place.declarations.items.append("\n".join(call("*bridged_weights(", given, indent=8)))

    def describe(self) -> str:
        return f"bridged: transformers' own {self.class_name}"


@dataclass(frozen=True)
class BridgedMixing(Bridge):
    """Attention or recurrence: its states are ours, under our scheduler."""

    names: tuple[str, ...] = ()
    """Of its states."""
    rotary: str | None = None
    """The target of the rotary tables that it takes."""
    window: str | ByLayer | None = field(default=None, metadata=BY_LAYER)
    """Code of how many tokens a query sees; None = all, or not attention."""
    chunked: bool | ByLayer = field(default=False, metadata=BY_LAYER)
    """Where there is a window, a query sees those of its own run of so many tokens."""
    word: ClassVar[str] = "mixed"

    @property
    def takes(self) -> tuple[str, ...]:
        return (*(("position_embeddings",) if self.rotary else ()), "batch", *self.names)

    def make(self) -> str:
        window = f", window={code_of(self.window)}" if self.window else ""
        window += ", chunked=True" if any(values_of(self.chunked)) else ""
        return f"BridgedMixer({self.constant}, config, layer, states={literals(self.names)}{window})"

    @property
    def targets(self) -> Mapping[str, str]:
        return {self.constant: self.target, **({self._rotary_constant: self.rotary} if self.rotary else {})}

    @property
    def _rotary_constant(self) -> str:
        return constant(str(self.rotary).rpartition(":")[2])

    def states(self) -> Mapping[str, str | ByLayer]:
        if not isinstance(self.window, ByLayer):
            return {name: f'{self._local}["{name}"]' for name in self.names}
        cases = list(enumerate(self.window.cases))
        return {
            name: ByLayer(tuple((condition, f'{self._local}_{place}["{name}"]') for place, (condition, _) in cases))
            for name in self.names
        }

    def state_locals(self) -> list[str]:
        if not isinstance(self.window, ByLayer):
            return self._listen(self._local, self.window)
        values = self.window.values()
        return [line for place, value in enumerate(values) for line in self._listen(f"{self._local}_{place}", value)]

    @property
    def _local(self) -> str:
        return f"{self.constant.lower()}_states"

    def _listen(self, local: str, window: str | None) -> list[str]:
        given = [self.constant, "config"]
        given += [f"rotary={self._rotary_constant}"] if self.rotary else []
        given += [f"window={window}"] if window else []
        return call(f"{local} = bridged_states(", given, indent=4)


def literals(names: Sequence[str]) -> str:
    """A tuple of strings as code."""
    return f"({', '.join(literal(name) for name in names)}{',' if len(names) == 1 else ''})"


def target_lines(name: str, target: str) -> list[str]:
    """The constant, broken where the line is too long."""
    line = f'{name} = "{target}"'
    if len(line) <= WIDTH:
        return [line]
    module, _, found = target.partition(":")
    return [f"{name} = (", f'    "{module}:"', f'    "{found}"', ")"]
