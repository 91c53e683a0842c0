"""Norms that apply their weight in another form (1 + w, per head, in float32), against transformers'."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from rtp_kernel.components import LayerNorm, RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_head_has_its_own_weight(dtype: torch.dtype) -> None:
    reference, ours = CohereLayerNorm((3, 8), eps=1e-3).to(dtype), LayerNorm(8, 1e-3, bias=False, heads=3).to(dtype)
    torch.nn.init.normal_(reference.weight)
    ours.load_state_dict(reference.state_dict())
    x = torch.randn(5, 3, 8).to(dtype)
    with torch.no_grad():
        assert torch.allclose(ours(x), reference(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("reference", "ours"),
    [
        (NemotronLayerNorm1P(8, eps=1e-3), LayerNorm(8, 1e-3, offset=1.0)),
        (Olmo2RMSNorm(8, eps=1e-3), RMSNorm(8, 1e-3, wide=True)),
    ],
    ids=["counts from one", "in float32"],
)
def test_the_form_is_made_once(reference: torch.nn.Module, ours: LayerNorm | RMSNorm, dtype: torch.dtype) -> None:
    reference, ours = copy.deepcopy(reference).to(dtype), copy.deepcopy(ours).to(dtype)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(reference.state_dict())
    x = torch.randn(5, 8).to(dtype)
    with torch.no_grad():
        before = ours(x)
        ours.prepare()
        assert torch.equal(ours(x), before)
        assert ours.state_dict().keys() == reference.state_dict().keys()
        ours.unprepare()
        assert torch.equal(ours(x), before)
        assert torch.allclose(before, reference(x), rtol=0, atol=1e-6)
