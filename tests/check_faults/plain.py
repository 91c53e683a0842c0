"""Other ways to compute the same: the plain references, and sums in double precision."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from check_faults.ops import FaultyAttention
from rtp_kernel.ops.linear import linear
from rtp_kernel.ops.moe import experts
from rtp_kernel.registry import OpContext, Support


class PlainAttention(FaultyAttention):
    """The plain reference in every regime."""

    name = "plain"


class PlainExperts:
    """A loop over the experts."""

    name = "plain"

    def supports(self, context: OpContext) -> Support:
        return Support(True)

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        return experts(*args, **options)


class DoubleLinear:
    """Products accumulated in float64."""

    name = "double"

    def supports(self, context: OpContext) -> Support:
        return Support(True)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)
