"""A report on a cut model in the whole model's numbers: what is found in layer 1 of the cut is of layer 27."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")


class Numbering:
    """The numbers that layers of a cut model have in the whole one.

    `layers`: dotted names of the cut model's decoder layers; `numbers`: of each, its index in the whole model.
    """

    def __init__(self, layers: Iterable[str], numbers: Sequence[int]) -> None:
        self._numbers = dict(enumerate(numbers))
        prefixes = {name.rpartition(".")[0] for name in layers}
        self._patterns = [re.compile(rf"(?<![\w.])({re.escape(prefix)}\.)(\d+)\b") for prefix in sorted(prefixes)]
        self._patterns.append(re.compile(r"\b(layers? )(\d+)\b"))

    def told(self, value: T) -> T:
        """A copy of a report, or of any part of it, with the whole model's numbers."""
        told: T = self._told(value)
        return told

    def _told(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._words(value)
        if isinstance(value, Mapping):
            return {self._told(key): self._field(key, item) for key, item in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            names = [each.name for each in fields(value) if each.init]
            return replace(value, **{name: self._field(name, getattr(value, name)) for name in names})
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(self._told(item) for item in value)
        return value

    def _field(self, name: Any, value: Any) -> Any:
        if name == "layer" and isinstance(value, int):
            return self._numbers.get(value, value)
        if name == "layers" and isinstance(value, list | tuple) and all(isinstance(item, int) for item in value):
            return type(value)(self._numbers.get(item, item) for item in value)
        return self._told(value)

    def _words(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(lambda match: match[1] + str(self._numbers.get(int(match[2]), match[2])), text)
        return text
