"""The same descriptors over other checkpoint names: a language model inside a vision-language checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rtp_runtime.weights.descriptors import Descriptor, FromCheckpoint, Source, Weight


def renamed(descriptors: Iterable[Descriptor], prefixes: Mapping[str, str]) -> tuple[Descriptor, ...]:
    """The descriptors with checkpoint names that begin with a key of `prefixes` beginning with its value instead.

    The first key that fits counts. Parameters, ties and `Skip` patterns keep their names.
    """

    def rename(name: str) -> str:
        for old, new in prefixes.items():
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    def moved(source: Source) -> Source:
        node: Any = source
        if isinstance(node, FromCheckpoint):
            return replace(node, name=rename(node.name))
        if hasattr(node, "parts"):
            return replace(node, parts=tuple(moved(part) for part in node.parts))  # type: ignore[no-any-return]
        return replace(node, part=moved(node.part))  # type: ignore[no-any-return]

    return tuple(replace(each, source=moved(each.source)) if isinstance(each, Weight) else each for each in descriptors)
