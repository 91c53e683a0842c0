"""The forms of a norm over the last dimension: what is subtracted, where eps stands, what the weight is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

EPS_VALUES = (1e-5, 1e-6, 1e-8, 1e-12)
"""What modeling files write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormForm:
    """A norm: (x - mean?) / size * (offset + weight) + bias."""

    eps: float
    centred: bool = False
    """Whether the mean is subtracted: LayerNorm."""
    offset: float = 0.0
    """1.0 where the weight is stored around zero."""
    weighted: bool = True
    biased: bool = True
    """Whether weight and bias are applied, where there are any."""
    eps_outside: bool = False
    """Whether eps is added to the root, not to the mean square."""
    whole: bool = False
    """Over all dimensions but the first, not the last alone: per head against whole vector."""
    sum_of_squares: bool = False
    """Divided by the Euclidean norm, not by the root of the mean square."""

    def apply(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """The norm of x [tokens, …, dim] in float32, in x's dtype; weight and bias [dim] or of x's last dimensions."""
        wide = x.float()
        dims = tuple(range(1, x.ndim)) if self.whole and x.ndim > 2 else (-1,)
        if self.centred:
            wide = wide - wide.mean(dims, keepdim=True)
        square = wide.square()
        size = square.sum(dims, keepdim=True) if self.sum_of_squares else square.mean(dims, keepdim=True)
        normed = wide / (size.sqrt() + self.eps) if self.eps_outside else wide * torch.rsqrt(size + self.eps)
        if weight is not None and self.weighted:
            normed = normed * (weight.float() + self.offset)
        if bias is not None and self.biased:
            normed = normed + bias.float()
        return normed.to(x.dtype)


def norm_variants(form: NormForm) -> Iterator[tuple[str, NormForm]]:
    """(stable name, form) of the norms that differ from `form` in one thing, eps apart."""
    yield "norm-offset", replace(form, offset=0.0 if form.offset else 1.0)
    yield "norm-weight", replace(form, weighted=not form.weighted)
    yield "norm-bias", replace(form, biased=not form.biased)
    yield "norm-centred", replace(form, centred=not form.centred)
    yield "norm-whole-vector", replace(form, whole=not form.whole)
    yield "norm-eps-place", replace(form, eps_outside=not form.eps_outside)
    yield "norm-size", replace(form, sum_of_squares=not form.sum_of_squares)
