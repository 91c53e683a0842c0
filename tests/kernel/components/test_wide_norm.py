"""A norm whose product with the weight is in float32, against transformers in bfloat16, bit for bit."""

from __future__ import annotations

import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm

from rtp_kernel.components import RMSNorm


def test_wide_is_gpt_oss() -> None:
    torch.manual_seed(0)
    reference, x = GptOssRMSNorm(48, 1e-5).bfloat16(), torch.randn(64, 48).bfloat16()
    reference.weight.data.normal_(1, 0.2)
    ours = RMSNorm(48, 1e-5, wide=True)
    ours.weight = reference.weight
    assert torch.equal(ours(x), reference(x))
    ours.wide = False
    assert not torch.equal(ours(x), reference(x))
