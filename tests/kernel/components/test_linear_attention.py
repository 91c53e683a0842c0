"""Components of linear attention: what they ask for when bound, and the gated norm against transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from rtp_kernel.components import CausalConv, GatedDeltaRule, GatedRMSNorm, bind_components
from rtp_kernel.registry import OpTable, default_registry


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("reference", "options"),
    [(Qwen3NextRMSNormGated, {}), (Glm5NextTextRMSNormGated, {"activation": "sigmoid", "wide": True})],
)
def test_gated_norm_is_that_of_transformers(reference: Any, options: Any, dtype: torch.dtype) -> None:
    theirs, ours = reference(12, eps=1e-5).to(dtype), GatedRMSNorm(12, 1e-5, **options).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    ours.weight.copy_(theirs.weight.detach())
    x, gate = torch.randn(2, 7, 3, 12).to(dtype)
    want = theirs(x, gate)
    tolerance = 1e-6 if dtype == torch.float32 else 0.0
    assert ours(x, gate).dtype == dtype and torch.allclose(ours(x, gate), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("reference", "options"),
    [
        (partial(MambaRMSNormGated, group_size=12), {"gate_first": True}),
        (partial(MambaRMSNormGated, group_size=4), {"gate_first": True, "groups": 3}),
        (partial(FalconH1RMSNormGated, n_groups=2), {"groups": 2, "wide": True}),
        (partial(FalconH1RMSNormGated, norm_before_gate=False), {"gate_first": True, "wide": True}),
    ],
)
def test_gate_first_and_groups_are_those_of_transformers(reference: Any, options: Any, dtype: torch.dtype) -> None:
    theirs, ours = reference(12, eps=1e-5).to(dtype), GatedRMSNorm(12, 1e-5, **options).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    ours.weight.copy_(theirs.weight.detach())
    x, gate = torch.randn(2, 7, 3, 12).to(dtype)
    want = theirs(x, gate)
    tolerance = 1e-6 if dtype == torch.float32 else 0.0
    assert ours(x, gate).dtype == dtype and torch.allclose(ours(x, gate), want, rtol=0, atol=tolerance)


def test_groups_divide_the_channels() -> None:
    with pytest.raises(ValueError, match="5 groups cannot share 12 channels"):
        GatedRMSNorm(12, 1e-5, groups=5)


def test_bound_and_unbound_agree(slot_mixes: Any) -> None:
    mix = slot_mixes["mixture"]
    parts = (torch.randn(mix.num_tokens, 2, 8), torch.randn(mix.num_tokens, 2, 8), torch.randn(mix.num_tokens, 4, 6))
    g, beta = -torch.rand(mix.num_tokens, 4), torch.rand(mix.num_tokens, 4)
    rule, conv = GatedDeltaRule(2, 4, 8, 6), CausalConv(10, 3)
    conv.weight.normal_()
    x, states, tails = torch.randn(mix.num_tokens, 10), torch.randn(4, 4, 8, 6), torch.randn(4, 10, 2)

    def run() -> tuple[Any, Any]:
        batch, state = mix.build(states)
        tail = mix.build(tails)[1]
        return rule(*parts, g, beta, batch, state), conv(x, batch, tail)

    before = run()
    table = OpTable(default_registry(), device="cpu", dtype=torch.float32)
    bind_components(torch.nn.ModuleList((rule, conv)), table, "cpu", torch.float32)
    assert {choice.op for choice in table.choices} == {"gated_delta_rule", "causal_conv"}
    for ours, bound in zip(before, run(), strict=True):
        assert torch.allclose(ours, bound, rtol=0, atol=6e-6)


def test_value_heads_are_a_multiple() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        GatedDeltaRule(2, 3, 8, 8)
