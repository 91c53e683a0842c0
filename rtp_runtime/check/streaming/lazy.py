"""Parameters that are read when a module asks for them, and given up when the memory is wanted for others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rtp_runtime.check.streaming.sources import Sources


class Pool:
    """Values that were asked for, up to `capacity` bytes, and all of the module that asks now."""

    def __init__(self, sources: Sources, capacity: int) -> None:
        self.sources = sources
        self.capacity = capacity
        self.asked: set[str] = set()
        """Names that a module has asked for since this was emptied."""
        self._held: OrderedDict[str, nn.Parameter] = OrderedDict()
        self.most = 0
        """Bytes held at most."""

    @property
    def num_bytes(self) -> int:
        return sum(value.nbytes for value in self._held.values())

    def get(self, name: str) -> nn.Parameter:
        """The value of a parameter, read if it is not held."""
        self.asked.add(name)
        if name not in self._held:
            self._make_room(name)
            self._held[name] = nn.Parameter(self.sources.make(name), requires_grad=False)
            self.most = max(self.most, self.num_bytes)
        self._held.move_to_end(name)
        return self._held[name]

    def _make_room(self, name: str) -> None:
        # Parameters of one module are asked for in turns, as an expert's two matrices: they stay together. Of others
        # the last one goes first: a forward asks for all in the same order, and what goes first would never be found.
        module = name.rpartition(".")[0]
        wanted = self.sources.size(name)
        for other in [held for held in reversed(self._held) if held.rpartition(".")[0] != module]:
            if self.num_bytes + wanted <= self.capacity:
                return
            del self._held[other]


class LazyParameters(dict[str, Any]):
    """A module's parameters: those on the meta device are had from the pool when the module asks for them.

    Whoever walks over the model (`named_parameters`) sees the meta tensors: shapes, and no values.
    """

    def __init__(self, parameters: Mapping[str, Any], names: Mapping[int, str], pool: Pool) -> None:
        super().__init__(parameters)
        self._names = names
        self._pool = pool

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        name = self._names.get(id(value)) if value is not None and value.is_meta else None
        return value if name is None else self._pool.get(name)

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        """A copy of the module has values of its own."""
        return {key: _copied(self[key]) for key in self}

    def __reduce__(self) -> Any:
        return dict, ({key: self[key] for key in self},)


def _copied(value: Any) -> Any:
    return None if value is None else nn.Parameter(value.detach().clone(), requires_grad=False)


def make_lazy(model: nn.Module, names: Mapping[int, str], pool: Pool) -> None:
    """Let every module of `model` have its parameters on the meta device, by `names` of their ids, from the pool."""
    for module in model.modules():
        if any(value is not None and value.is_meta for value in module._parameters.values()):
            module.__dict__["_parameters"] = LazyParameters(module._parameters, names, pool)


def read_rows_only(module: nn.Embedding, tensor: str, pool: Pool, name: str) -> None:
    """Let a large embedding read the rows of the step's tokens, and no others."""

    def forward(ids: Tensor) -> Tensor:
        pool.asked.add(name)
        unique, places = torch.unique(ids, return_inverse=True)
        rows = pool.sources.stored.some_rows(tensor, unique.tolist())
        return rows[places]

    _set_forward(module, forward)


def multiply_in_blocks(module: nn.Linear, tensor: str, pool: Pool, name: str, rows: int) -> None:
    """Let a large linear layer read `rows` rows of its matrix at a time."""

    def forward(x: Tensor) -> Tensor:
        pool.asked.add(name)
        parts = []
        for first in range(0, module.out_features, rows):
            last = min(first + rows, module.out_features)
            bias = None if module.bias is None else module.bias[first:last]
            parts.append(nn.functional.linear(x, pool.sources.stored.rows(tensor, first, last), bias))
        return torch.cat(parts, dim=-1)

    _set_forward(module, forward)


def _set_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    module.__dict__["forward"] = forward
