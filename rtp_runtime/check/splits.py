"""The outputs of fused layers, split into the parts that the reference has as modules of their own.

The weight descriptor's own operation splits them: it says how the parts became one. Where the module says so itself
(`parts`), both must agree, or the layout of the fused parameter is not what the module takes it for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from rtp_runtime.check.names import parent_of
from rtp_runtime.weights.resolve import Parameter, ResolvedLayout


class FusedOutputs:
    """Which of our modules are several of the reference's, and how their outputs split."""

    def __init__(self, module: nn.Module, layout: ResolvedLayout, reference_modules: set[str]) -> None:
        parameters = {parameter.name: parameter for parameter in layout.parameters}
        self._by_module: dict[str, tuple[str, ...]] = {}
        self._by_descriptor: dict[str, Parameter] = {}
        for name, child in module.named_modules():
            if name in reference_modules:
                continue
            parts = tuple(f"{parent_of(name)}.{part}" for part in getattr(child, "parts", ()))
            if parts and reference_modules.issuperset(parts):
                self._by_module[name] = parts
            weight = parameters.get(f"{name}.weight")
            if weight is not None and reference_modules.issuperset(_sources(weight)):
                self._by_descriptor[name] = weight

    def parts(self, name: str) -> tuple[str, ...]:
        """The reference's modules that our module `name` is made of; empty if it is not fused."""
        if name in self._by_module:
            return self._by_module[name]
        weight = self._by_descriptor.get(name)
        return tuple(_sources(weight)) if weight is not None else ()

    def names(self) -> set[str]:
        """Our fused modules."""
        return self._by_module.keys() | self._by_descriptor.keys()

    def split(self, name: str, outputs: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(part, output [rows, features]) by the module's own split, then by the descriptor's where that differs."""
        seen: dict[str, Tensor] = {}
        if name in self._by_module:
            seen = dict(zip(self._by_module[name], outputs, strict=False))
            yield from seen.items()
        weight = self._by_descriptor.get(name)
        if weight is not None:
            for part, tensor in _split(weight, torch.cat(list(outputs), dim=-1)).items():
                if part not in seen or not torch.equal(seen[part], tensor):
                    yield part, tensor


def _sources(weight: Parameter) -> list[str]:
    from rtp_runtime.weights.operations import leaves

    return [parent_of(leaf.name) for leaf in leaves(weight.source)]


def _split(weight: Parameter, output: Tensor) -> Mapping[str, Tensor]:
    from rtp_runtime.errors import NotJudgedError
    from rtp_runtime.weights.outputs import split_output

    try:
        parts = split_output(weight.source, output)
    except NotJudgedError:
        return {}
    return {parent_of(name): part for name, part in parts.items()}
