"""Linear layers on the CPU with weights that oneDNN has packed once, after loading."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.memory import empty
from rtp_kernel.registry import OpContext, Support


def bf16_products() -> bool:
    """Whether oneDNN multiplies bfloat16 matrices on this CPU (AVX-512 or better)."""
    return has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_onednn() -> bool:
    """Whether this build of torch has oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out, in] as a product wants it."""

    packed: Tensor
    """In oneDNN's blocked layout; opaque."""
    single: Tensor | None
    """[out, in], for a product with a single row, where another form is faster then."""


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


class _Packed:
    """What both forms share: an unprepared weight works too, and a single row may have a form of its own."""

    def __call__(self, x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, Tensor):
            return functional.linear(x, weight, bias)
        if weight.single is not None and x.numel() == x.shape[-1]:
            return self._row(x, weight.single, bias)
        if x.numel() == 0:
            return x.new_zeros(*x.shape[:-1], weight.packed.shape[0])
        return self._product(x, weight.packed, bias)

    def _row(self, x: Tensor, single: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, single, bias)

    def _product(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        return packed_linear(x, packed, bias)


class PackedLinear(_Packed):
    """Products on oneDNN's packed weights; a single float32 row reads the plain weight faster.

    Taken for bfloat16. A float32 product on packed weights is off by 4.3e-7 to 5.2e-7 of its size where the plain one
    is off by 2.5e-7 (against float64, 576 to 1,536 terms), and who asks for float32 asks for accuracy: its packed form
    serves only the row tiles of deterministic runs.
    """

    name = "cpu_onednn_packed"

    def supports(self, context: OpContext) -> Support:
        return Support.unless(
            *_common_reasons(context),
            context.dtype == torch.float32 and "rounds twice as far in float32 as the plain product",
            context.dtype not in (torch.float32, torch.bfloat16) and f"has no {context.dtype}",
            context.dtype == torch.bfloat16 and not bf16_products() and "this CPU has no bfloat16 products (AVX-512)",
        )

    def prepare(self, weight: Tensor) -> PackedWeight:
        return PackedWeight(pack(weight), weight if weight.dtype == torch.float32 else None)

    def prepared_bytes(self, weight: Tensor) -> int:
        """What `prepare` adds to the memory that is taken."""
        return weight.nbytes

    def release(self, prepared: PackedWeight) -> PackedWeight:
        """The prepared weight without the logical one."""
        return replace(prepared, single=None)

    def restore(self, prepared: PackedWeight, dtype: torch.dtype) -> Tensor:
        """The logical weight, bit for bit."""
        return prepared.packed.to_dense()


class WidenedLinear(_Packed):
    """bfloat16 weights widened to float32, for CPUs without bfloat16 products: far faster, for four times the memory.

    One copy is packed; the other, for single rows, lies transposed, in huge pages: such a product is bound by reading.
    """

    name = "cpu_onednn_widened"

    def supports(self, context: OpContext) -> Support:
        return Support.unless(
            *_common_reasons(context),
            context.dtype != torch.bfloat16 and "widens bfloat16 only",
            context.dtype == torch.bfloat16 and bf16_products() and "this CPU has bfloat16 products",
        )

    def prepare(self, weight: Tensor) -> PackedWeight:
        wide = weight.detach().float()
        return PackedWeight(pack(wide), empty(wide.T.shape, wide.dtype).copy_(wide.T).T)

    def prepared_bytes(self, weight: Tensor) -> int:
        """What `prepare` adds to the memory that is taken."""
        return 4 * weight.nbytes

    def release(self, prepared: PackedWeight) -> PackedWeight:
        """The prepared weight itself, which holds nothing of the logical one."""
        return prepared

    def restore(self, prepared: PackedWeight, dtype: torch.dtype) -> Tensor:
        """The logical weight, bit for bit."""
        bits = prepared.packed.to_dense().view(torch.int32) >> 16  # a cast would give every NaN the same payload
        return bits.to(torch.int16).view(dtype)

    def _row(self, x: Tensor, single: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x.float(), single, None if bias is None else bias.float()).to(x.dtype)

    def _product(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        return packed_linear(x.float(), packed, None if bias is None else bias.float()).to(x.dtype)
