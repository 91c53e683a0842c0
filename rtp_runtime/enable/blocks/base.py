"""What every block of a recognised decoder offers to the writer of its model file: its code, weights and states."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rtp_runtime.enable.code import choice
from rtp_runtime.enable.declarations import Place
from rtp_runtime.enable.templates import render

BY_LAYER: Mapping[str, Any] = {"by_layer": True}
"""Metadata of a dataclass field (`field(metadata=BY_LAYER)`) that may differ between layers of one class."""


@dataclass(frozen=True)
class ByLayer:
    """Something that differs between layers: of the first case whose condition holds, else of the last one.

    A case is (condition, value); conditions are code over `config` and `layer`, None in the last case only.
    """

    cases: tuple[tuple[str | None, Any], ...]

    def code(self) -> str:
        """The conditional expression over cases whose values are code, None standing for itself."""
        return choice([(condition, str(value)) for condition, value in self.cases])

    def values(self) -> list[Any]:
        return [value for _, value in self.cases]


def code_of(value: str | ByLayer | None) -> str | None:
    """The code of a field that may differ between layers; None when it is not there."""
    return value.code() if isinstance(value, ByLayer) else value


def values_of(value: Any) -> list[Any]:
    """Every value that a field takes in some layer."""
    return value.values() if isinstance(value, ByLayer) else [value]


class Block(abc.ABC):
    """Facts about one module of a decoder layer (a frozen dataclass), and the code that follows from them."""

    class_name: str
    """Of the reference's module, and of the class that `source` writes."""
    word: ClassVar[str] = "block"
    """What a variable with its output is called."""
    template: ClassVar[str | None] = None
    """The file of `enable/templates/` with its classes, which sees the block as `s`."""

    @property
    def takes(self) -> tuple[str, ...]:
        """What its call is given after the hidden rows: "position_embeddings", "batch", names of its states."""
        states = tuple(self.states())
        return ("batch", *states) if states else ()

    def source(self) -> list[str]:
        """The lines of its classes at module level, [] when components say it all.

        Two blank lines stand between classes, none at the ends. What it uses of our public names is imported.
        """
        return [] if self.template is None else render(self.template, s=self).rstrip("\n").split("\n")

    def by_layer(self) -> bool:
        """Whether its constructor wants the number of the layer."""
        return False

    def make(self) -> str:
        """The expression that constructs it, over `config` and `layer`."""
        return f"{self.class_name}(config{', layer' if self.by_layer() else ''})"

    def called(self, name: str) -> str:
        """The expression that a layer calls, for the attribute `name`."""
        return f"self.{name}"

    @abc.abstractmethod
    def declare(self, place: Place) -> None:
        """Add the descriptors of its weights."""

    def states(self) -> Mapping[str, str | ByLayer]:
        """Name of each state -> the code of its descriptor, over `config`."""
        return {}

    def state_locals(self) -> list[str]:
        """Lines before the codes of `states`, which may use them."""
        return []

    @abc.abstractmethod
    def describe(self) -> str:
        """What was recognised, in words."""
