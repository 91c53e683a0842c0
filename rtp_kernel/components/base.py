"""What all components share: plain construction, then binding, then (after loading) preparing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rtp_kernel.memory import available, huge_pages
from rtp_kernel.registry import OpFunction, OpTable


@dataclass(frozen=True, slots=True)
class Binding:
    """What a component is told when it is bound: its dotted name, where ops come from, and where its buffers live."""

    name: str
    ops: OpTable
    device: torch.device
    dtype: torch.dtype

    def op(
        self,
        op: str,
        *,
        regime: str = "any",
        shapes: Mapping[str, int] | None = None,
        options: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
    ) -> OpFunction:
        """The implementation of `op` for this component. Raises `OpSelectionError` when none serves it."""
        return self.ops.select(self.name, op, regime=regime, shapes=shapes, options=options, dtype=dtype)


class Component(nn.Module):
    """A module that model files are made of.

    Built plainly (usually on the meta device), it computes with the plain references. `bind` chooses its ops and makes
    its buffers on the device; `prepare`, once after loading, derives what the chosen ops want in place of the weights.
    """

    def bind(self, binding: Binding) -> None:
        """Choose ops and make buffers; nothing by default."""

    def prepare(self) -> None:
        """Derive what the chosen ops want from the loaded weights; nothing by default."""

    def prepared_bytes(self) -> int:
        """Memory that `prepare` takes; 0 by default."""
        return 0

    def free(self) -> None:
        """Give up logical weights that `logical` can make again bit for bit; nothing by default."""

    def unprepare(self) -> None:
        """Drop what `prepare` derived: the logical parameters are in place, and read, again; nothing by default."""

    def logical(self, name: str) -> Tensor:
        """The parameter or buffer `name` as it was loaded, also when it has been freed."""
        found = getattr(self, name)
        assert isinstance(found, Tensor)
        return found


def components(module: nn.Module) -> Iterator[tuple[str, Component]]:
    """Every component of the module with its dotted name."""
    for name, child in module.named_modules():
        if isinstance(child, Component):
            yield name, child


def bind_components(module: nn.Module, ops: OpTable, device: torch.device | str, dtype: torch.dtype) -> None:
    """Bind each component by its dotted name. Raises `OpSelectionError` when nothing serves one of its ops."""
    for name, component in components(module):
        component.bind(Binding(name, ops, torch.device(device), dtype))


def prepare_components(module: nn.Module, *, free: bool = False, memory: int | None = None) -> None:
    """Let each component prepare its weights, once, after loading.

    Components are prepared in order as long as what they derive fits in `memory` bytes, by default half of what is
    available; the others compute with their logical weights. `free` gives up logical weights of which a prepared form
    holds all bits: their parameters stay in place, on the meta device, and `logical` makes them again. A parameter that
    several components share is kept.
    """
    found = [component for _, component in components(module)]
    holders = Counter(id(weight) for part in module.modules() for weight in part.parameters(recurse=False))
    have = available()
    left = memory if memory is not None else have // 2 if have is not None else float("inf")
    with huge_pages():
        for component in found:
            left -= component.prepared_bytes()
            if left < 0:
                break
            component.prepare()
            if free and all(holders[id(weight)] == 1 for weight in component.parameters(recurse=False)):
                component.free()


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """An uninitialised, frozen parameter on the default device; `dtype` pins it whatever the model's."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
