"""LayerNorm that multiplies by 1 + w, and with parameters for each head, against transformers'."""

from __future__ import annotations

import pytest
import torch
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from rtp_kernel.components import LayerNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_head_has_its_own_weight(dtype: torch.dtype) -> None:
    reference, ours = CohereLayerNorm((3, 8), eps=1e-3).to(dtype), LayerNorm(8, 1e-3, bias=False, heads=3).to(dtype)
    torch.nn.init.normal_(reference.weight)
    ours.load_state_dict(reference.state_dict())
    x = torch.randn(5, 3, 8).to(dtype)
    with torch.no_grad():
        assert torch.allclose(ours(x), reference(x), rtol=0, atol=1e-6)


def test_weights_may_count_from_one() -> None:
    reference, ours = NemotronLayerNorm1P(8, eps=1e-3), LayerNorm(8, 1e-3, offset=1.0)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(reference.state_dict())
    x = torch.randn(5, 8)
    with torch.no_grad():
        assert torch.allclose(ours(x), reference(x), rtol=0, atol=1e-6)
