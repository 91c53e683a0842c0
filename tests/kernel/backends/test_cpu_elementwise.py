"""Norm and rotary in fewer calls are the references."""

from __future__ import annotations

import pytest
import torch

from rtp_kernel.backends.cpu.elementwise import RmsNorm, RotaryHalf
from rtp_kernel.ops.norm import rms_norm
from rtp_kernel.ops.rotary import rotary
from rtp_kernel.registry import OpContext


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 64), (3, 4, 32), (0, 64)])
def test_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    for each in (weight, None):
        want, got = rms_norm(x, each, 1e-6), RmsNorm()(x, each, 1e-6)
        assert got.dtype == dtype
        assert torch.allclose(got.float(), want.float(), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)


def test_a_float32_weight_is_multiplied_before_the_cast() -> None:
    x, weight = torch.randn(7, 64).bfloat16(), torch.randn(64)
    want, got = rms_norm(x, weight, 1e-6), RmsNorm()(x, weight, 1e-6)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [32, 8])
def test_rotary(dtype: torch.dtype, rotary_dim: int) -> None:
    q, k = torch.randn(5, 4, 32).to(dtype), torch.randn(5, 2, 32).to(dtype)
    cos, sin = torch.randn(5, rotary_dim).to(dtype), torch.randn(5, rotary_dim).to(dtype)
    for ours, want in zip(RotaryHalf()(q, k, cos, sin), rotary(q, k, cos, sin), strict=True):
        assert (ours.shape, ours.dtype) == (want.shape, dtype)
        assert torch.allclose(ours.float(), want.float(), atol=1e-6 if dtype == torch.float32 else 6e-2)


def test_they_refuse_what_they_do_not_compute() -> None:
    norm = OpContext(device="cpu", dtype=torch.float32, options={"offset": 1.0})
    assert RmsNorm().supports(norm).reasons == ("multiplies by w only",)
    layout = OpContext(device="cpu", dtype=torch.float32, options={"layout": "interleaved"})
    assert RotaryHalf().supports(layout).reasons == ("rotates halves only",)
