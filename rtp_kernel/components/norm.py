"""Norms over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.components.base import Binding, Component, parameter
from rtp_kernel.ops.norm import layer_norm, rms_norm
from rtp_kernel.registry import OpFunction


class _Norm(Component):
    """A norm whose `weight` is applied in a form that follows from it, made once after loading."""

    weight: Tensor | None
    _prepared: Tensor | None = None

    def _form(self, weight: Tensor) -> Tensor:
        """What is multiplied by; the weight itself where it is as it should be."""
        raise NotImplementedError

    def _applied(self) -> Tensor | None:
        return self._form(self.weight) if self._prepared is None and self.weight is not None else self._prepared

    def prepare(self) -> None:
        made = None if self.weight is None else self._form(self.weight)
        self._prepared = None if made is self.weight else made

    def unprepare(self) -> None:
        self._prepared = None


class RMSNorm(_Norm):
    """x [..., dim] -> [..., dim]; `weight` [dim], or none at all.

    offset 0 normalises in float32, casts, then multiplies by w; offset 1.0 multiplies by 1 + w in float32 before that.
    A `dtype` of float32 pins the weight and multiplies in float32 before the cast as well; so does `wide`, with a
    weight of the model's dtype (OLMo 2, gpt-oss). With `groups`, x is [..., groups * dim] and each group is normed on
    its own; `weight` [groups * dim].
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        offset: float = 0.0,
        *,
        weight: bool = True,
        dtype: torch.dtype | None = None,
        groups: int = 1,
        wide: bool = False,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.groups = groups
        self.wide = wide
        self.eps = eps
        self.offset = offset
        self.weight = parameter(groups * dim, dtype=dtype) if weight else None
        self._pinned = dtype is not None
        self._op: OpFunction = rms_norm

    def bind(self, binding: Binding) -> None:
        options = {"offset": self.offset, "pinned": self._pinned or self.wide, "groups": self.groups}
        self._op = binding.op("rms_norm", shapes={"dim": self.dim}, options=options)

    def _form(self, weight: Tensor) -> Tensor:
        return weight.float() if self.wide else weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self._applied()
        if self.groups == 1:
            out: Tensor = self._op(x, weight, self.eps, self.offset)
            return out
        weight = None if weight is None else weight.view(self.groups, self.dim)
        out = self._op(x.view(*x.shape[:-1], self.groups, self.dim), weight, self.eps, self.offset)
        return out.flatten(-2)

    def extra_repr(self) -> str:
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        return f"{self.dim}, eps={self.eps}, offset={self.offset}{groups}"


class LayerNorm(_Norm):
    """x [..., dim] -> [..., dim]; `weight` [dim] or None, `bias` [dim] or None. Multiplied by `offset` + w.

    With `heads`, x is [..., heads, dim] and each head has parameters of its own, [heads, dim], applied in float32.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        bias: bool = True,
        weight: bool = True,
        offset: float = 0.0,
        heads: int | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        shape = (dim,) if heads is None else (heads, dim)
        self.weight = parameter(*shape) if weight else None
        self.bias = parameter(*shape) if bias else None
        self.heads = heads
        self.offset = offset
        self._op: OpFunction = layer_norm

    def bind(self, binding: Binding) -> None:
        self._op = binding.op("layer_norm", shapes={"dim": self.dim})

    def _form(self, weight: Tensor) -> Tensor:
        return weight + self.offset if self.offset else weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self._applied()
        if self.heads is None:
            out: Tensor = self._op(x, weight, self.bias, self.eps)
            return out
        normed: Tensor = self._op(x.float(), None, None, self.eps)
        normed = normed if weight is None else normed * weight.float()
        return (normed if self.bias is None else normed + self.bias.float()).to(x.dtype)
