"""Norms against transformers' and torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRMSNorm

from rtp_kernel.components import RMSNorm
from rtp_kernel.ops.norm import layer_norm, rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_weight_is_the_llama_norm_bit_for_bit(dtype: torch.dtype) -> None:
    theirs = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    theirs.weight.data = torch.randn(48).to(dtype)
    x = torch.randn(7, 48).to(dtype)
    assert torch.equal(rms_norm(x, theirs.weight, 1e-5), theirs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offset_one_is_the_zero_centred_norm_bit_for_bit(dtype: torch.dtype) -> None:
    theirs = Gemma2RMSNorm(48, eps=1e-6).to(dtype)
    theirs.weight.data = torch.randn(48).to(dtype)
    x = torch.randn(3, 5, 48).to(dtype)
    assert torch.equal(rms_norm(x, theirs.weight, 1e-6, offset=1.0), theirs(x))


def test_no_weight_only_normalises() -> None:
    x = torch.randn(4, 32) * 100
    assert torch.allclose(rms_norm(x, None, 0.0).square().mean(-1), torch.ones(4))


def test_layer_norm_has_weight_and_bias() -> None:
    x, weight, bias = torch.randn(4, 32), torch.randn(32), torch.randn(32)
    want = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-6) * weight + bias
    assert torch.allclose(layer_norm(x, weight, bias, 1e-6), want, atol=1e-5)
    assert torch.equal(layer_norm(x, None, None, 1e-6), functional.layer_norm(x, (32,), eps=1e-6))


@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_groups(groups: int, dtype: torch.dtype) -> None:
    theirs = Qwen4ExpTextRMSNorm(24 * groups, group_size=24, eps=1e-6).to(dtype)
    theirs.weight.data.normal_()
    ours = RMSNorm(24, 1e-6, 1.0, groups=groups).to(dtype)
    ours.weight = torch.nn.Parameter(theirs.weight.data)
    x = torch.randn(5, 24 * groups).to(dtype)
    assert torch.equal(ours(x), theirs(x))
