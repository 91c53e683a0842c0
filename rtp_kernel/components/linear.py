"""Linear layers: one matrix, or several that read the same input fused into one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rtp_kernel.components.base import Binding, Component, parameter
from rtp_kernel.ops.linear import grouped_linear, linear
from rtp_kernel.registry import OpFunction, implementation_of


class Linear(Component):
    """x [..., in_features] -> [..., out_features]; `weight` [out, in], `bias` [out]. A `dtype` pins both."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = parameter(out_features, in_features, dtype=dtype)
        self.bias = parameter(out_features, dtype=dtype) if bias else None
        self._pinned = dtype
        self._op: OpFunction = linear
        self._prepared: Any = None

    def bind(self, binding: Binding) -> None:
        shapes = {"in": self.in_features, "out": self.out_features}
        self._op = binding.op("linear", shapes=shapes, dtype=self._pinned)

    def prepare(self) -> None:
        make = getattr(implementation_of(self._op), "prepare", None)
        self._prepared = None if make is None else make(self.logical("weight"))

    def prepared_bytes(self) -> int:
        measure = getattr(implementation_of(self._op), "prepared_bytes", None)
        return 0 if measure is None else int(measure(self.weight))

    def free(self) -> None:
        release = getattr(implementation_of(self._op), "release", None)
        if self._prepared is not None and release is not None:
            self._prepared = release(self._prepared)
            self.weight = nn.Parameter(self.weight.to("meta"), requires_grad=False)

    def unprepare(self) -> None:
        self.weight = nn.Parameter(self.logical("weight"), requires_grad=False) if self.weight.is_meta else self.weight
        self._prepared = None

    def logical(self, name: str) -> Tensor:
        if name == "weight" and self.weight.is_meta and self._prepared is not None:
            weight: Tensor = implementation_of(self._op).restore(self._prepared, self.weight.dtype)
            return weight
        return super().logical(name)

    def project(self, x: Tensor) -> Tensor:
        """x @ weight^T + bias, unsplit."""
        if self._pinned is not None and x.dtype != self._pinned:
            x = x.to(self._pinned)
        weight = self.weight if self._prepared is None else self._prepared
        out: Tensor = self._op(x, weight, self.bias)
        return out

    def forward(self, x: Tensor) -> Any:
        return self.project(x)

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, bias={self.bias is not None}"


class MergedLinear(Linear):
    """Several projections of one input in one product; forward -> the parts' outputs, in order.

    `parts` names them (as the reference's modules) and gives their output sizes; `weight` is their concatenation.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], bias: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias, dtype)
        self.parts = dict(parts)
        self._sizes = list(self.parts.values())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split_with_sizes(self.project(x), self._sizes, dim=-1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, parts={self.parts}"


class GroupedLinear(Component):
    """x [..., groups, in_features] -> [..., groups, out_features / groups]: each group has a matrix of its own.

    `weight` [out_features, in_features] holds the groups' matrices one below the other (DeepSeek-V4's `o_a_proj`).
    """

    def __init__(self, in_features: int, out_features: int, groups: int) -> None:
        super().__init__()
        if out_features % groups:
            raise ValueError(f"{out_features} output features cannot be dealt to {groups} groups: no multiple")
        self.in_features = in_features
        self.out_features = out_features
        self.groups = groups
        self.weight = parameter(out_features, in_features)
        self._op: OpFunction = grouped_linear

    def bind(self, binding: Binding) -> None:
        shapes = {"in": self.in_features, "out": self.out_features, "groups": self.groups}
        self._op = binding.op("grouped_linear", shapes=shapes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._op(x, self.weight)
        return out

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, groups={self.groups}"
