"""Linear layers on the CPU with weights that oneDNN has packed once, after loading."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.registry import OpContext, Support


def bf16_products() -> bool:
    """Whether oneDNN multiplies bfloat16 matrices on this CPU (AVX-512 or better)."""
    return has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_onednn() -> bool:
    """Whether this build of torch has oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def pack(weight: Tensor) -> Tensor:
    """weight [out, in] in oneDNN's blocked layout; opaque, `to_dense()` gives it back bit for bit."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] @ packed [out, in]^T + bias [out] -> [..., out]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def _common_reasons(context: OpContext) -> tuple[str | bool, ...]:
    return (
        context.device != "cpu" and "runs on the CPU only",
        not has_onednn() and "this build of torch has no oneDNN",
        context.deterministic and "its result for a row depends on the number of rows",
    )


class PackedLinear:
    """float32 and bfloat16 products on oneDNN's packed weights."""

    name = "cpu_onednn_packed"

    def supports(self, context: OpContext) -> Support:
        return Support.unless(
            *_common_reasons(context),
            context.dtype not in (torch.float32, torch.bfloat16) and f"has no {context.dtype}",
            context.dtype == torch.bfloat16 and not bf16_products() and "this CPU has no bfloat16 products (AVX-512)",
        )

    def prepare(self, weight: Tensor) -> Tensor:
        return pack(weight)

    def restore(self, prepared: Tensor, dtype: torch.dtype) -> Tensor:
        """The logical weight, bit for bit."""
        return prepared.to_dense()

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not weight.is_mkldnn or x.numel() == 0:
            return functional.linear(x, weight.to_dense() if weight.is_mkldnn else weight, bias)
        return packed_linear(x, weight, bias)


class WidenedLinear:
    """bfloat16 weights packed as float32, for CPUs without bfloat16 products: twice the memory, far faster."""

    name = "cpu_onednn_widened"

    def supports(self, context: OpContext) -> Support:
        return Support.unless(
            *_common_reasons(context),
            context.dtype != torch.bfloat16 and "widens bfloat16 only",
            context.dtype == torch.bfloat16 and bf16_products() and "this CPU has bfloat16 products",
        )

    def prepare(self, weight: Tensor) -> Tensor:
        return pack(weight.float())

    def restore(self, prepared: Tensor, dtype: torch.dtype) -> Tensor:
        """The logical weight, bit for bit."""
        bits = prepared.to_dense().view(torch.int32) >> 16  # a cast would give every NaN the same payload
        return bits.to(torch.int16).view(dtype)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not weight.is_mkldnn or x.numel() == 0:
            return functional.linear(x, self.restore(weight, x.dtype) if weight.is_mkldnn else weight, bias)
        out = packed_linear(x.float(), weight, None if bias is None else bias.float())
        return out.to(x.dtype)
