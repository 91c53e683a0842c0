"""Linear layers on packed weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.backends.cpu.linear import PackedLinear, WidenedLinear, bf16_products
from rtp_kernel.registry import OpContext, default_registry


def _id(value: object) -> str:
    """The same in every process, which pytest-xdist needs; an object's repr has its address."""
    return str(getattr(value, "name", value))


WAYS = [(PackedLinear(), torch.float32), (WidenedLinear(), torch.bfloat16)]
if bf16_products():
    WAYS.append((PackedLinear(), torch.bfloat16))


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize(("op", "dtype"), WAYS, ids=_id)
@pytest.mark.parametrize("rows", [0, 1, 2, 33])
@pytest.mark.parametrize("sizes", [(96, 64), (7, 33)])
def test_is_the_product(
    op: PackedLinear | WidenedLinear, dtype: torch.dtype, rows: int, sizes: tuple[int, int]
) -> None:
    weight, bias, x = (
        torch.randn(*sizes).to(dtype),
        torch.randn(sizes[0]).to(dtype),
        torch.randn(rows, sizes[1]).to(dtype),
    )
    packed = op.prepare(weight)
    for each in (None, bias):
        want = functional.linear(x.double(), weight.double(), None if each is None else each.double())
        got = op(x, packed, each)
        assert (got.dtype, got.shape) == (dtype, want.shape)
        if rows:
            assert _rms(got - want) / _rms(want) < (1e-6 if dtype == torch.float32 else 4e-3)
        assert torch.allclose(op(x, weight, each).double(), got.double(), atol=1e-5 if dtype == torch.float32 else 0.3)


@pytest.mark.parametrize("op", [op for op, _ in WAYS], ids=_id)
def test_says_how_much_memory_it_takes(op: PackedLinear | WidenedLinear) -> None:
    weight = torch.randn(48, 64).to(torch.bfloat16 if isinstance(op, WidenedLinear) else torch.float32)
    prepared = op.prepare(weight)
    forms = [form for form in (prepared.packed.to_dense(), prepared.single) if form is not None and form is not weight]
    assert op.prepared_bytes(weight) == sum(form.nbytes for form in forms)


@pytest.mark.parametrize(("op", "dtype"), WAYS, ids=_id)
def test_without_the_logical_weight_a_single_row_is_the_same_product(
    op: PackedLinear | WidenedLinear, dtype: torch.dtype
) -> None:
    weight, x = torch.randn(48, 64).to(dtype), torch.randn(1, 64).to(dtype)
    kept = op.prepare(weight)
    released = op.release(kept)
    assert released.single is None or released.single.data_ptr() != weight.data_ptr()
    assert torch.equal(op.restore(released, dtype), weight)
    want = x.double() @ weight.double().T
    for each in (kept, released):
        assert _rms(op(x, each) - want) / _rms(want) < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize(("op", "dtype"), WAYS, ids=_id)
def test_leading_dimensions_are_kept(op: PackedLinear | WidenedLinear, dtype: torch.dtype) -> None:
    weight, x = torch.randn(8, 64).to(dtype), torch.randn(3, 5, 64).to(dtype)
    got = op(x, op.prepare(weight))
    assert got.shape == (3, 5, 8)
    assert torch.allclose(got.float(), functional.linear(x.float(), weight.float()), atol=0.2)


@pytest.mark.parametrize(("op", "dtype"), WAYS, ids=_id)
@pytest.mark.parametrize("sizes", [(96, 64), (7, 33), (1, 1), (130, 577)])
def test_the_logical_weight_comes_back_bit_for_bit(
    op: PackedLinear | WidenedLinear, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    weight = torch.randn(*sizes).to(dtype)
    weight[0, 0] = float("nan")
    restored = op.restore(op.prepare(weight), dtype)
    assert restored.dtype == dtype
    assert torch.equal(restored.view(torch.uint8), weight.view(torch.uint8))


def test_float32_packed_keeps_float32_accuracy() -> None:
    weight, x = torch.randn(64, 2048), torch.randn(9, 2048)
    want = x.double() @ weight.double().T
    assert _rms(PackedLinear()(x, PackedLinear().prepare(weight)) - want) / _rms(want) < 1e-6


def test_one_of_both_serves_bfloat16_on_every_cpu_and_float32_stays_plain() -> None:
    names = [
        default_registry().select("linear", OpContext(device="cpu", dtype=dtype)).implementation.name
        for dtype in (torch.bfloat16, torch.float32)
    ]
    assert names[0].startswith("cpu_onednn") and names[1] == "reference"
    refused = PackedLinear().supports(OpContext(device="cuda", dtype=torch.float16, deterministic=True))
    assert len(refused.reasons) == 3
