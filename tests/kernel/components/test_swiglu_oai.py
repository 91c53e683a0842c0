"""The gated activation of gpt-oss and MiniMax-M3 with a slope of its own, and routing weights that stay float32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLDenseMLP, MiniMaxM3VLExperts
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from rtp_kernel.components import Activation, Experts, GatedMLP, TopKRouter, bind_components
from rtp_kernel.registry import OpTable, default_registry


def bound(module: nn.Module, dtype: torch.dtype = torch.float32, deterministic: bool = False) -> nn.Module:
    table = OpTable(default_registry(), device="cpu", dtype=dtype, deterministic=deterministic)
    bind_components(module, table, "cpu", dtype)
    return module


def m3(alpha: float) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 12, "dense_intermediate_size": 12, "num_local_experts": 5}
    return SimpleNamespace(**sizes, swiglu_alpha=alpha, swiglu_limit=1.5, _experts_implementation="eager")


@torch.no_grad()
def fill(module: nn.Module) -> Any:
    for parameter in module.parameters():
        parameter.normal_()
    return module


@pytest.mark.parametrize("alpha", [1.702, 0.7])
@pytest.mark.parametrize("deterministic", [False, True])
@torch.no_grad()
def test_mlp_and_experts_take_the_slope(alpha: float, deterministic: bool) -> None:
    theirs, ours = fill(MiniMaxM3VLDenseMLP(m3(alpha))), GatedMLP(16, 12, "swiglu_oai", limit=1.5, alpha=alpha)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(6, 16)
    bound(ours, deterministic=deterministic)
    assert torch.allclose(ours(x), theirs(x), rtol=0, atol=2e-5)

    experts, mine = fill(MiniMaxM3VLExperts(m3(alpha))), Experts(5, 16, 12, "swiglu_oai", limit=1.5, alpha=alpha)
    mine.load_state_dict(experts.state_dict())
    ids, weights = torch.randint(5, (6, 2)), torch.rand(6, 2)
    ids[:, 1] = (ids[:, 0] + 1) % 5
    bound(mine, deterministic=deterministic)
    assert torch.allclose(mine(x, weights, ids), experts(x, ids, weights), rtol=0, atol=2e-5)


@torch.no_grad()
def test_wide_routing_weights_are_those_of_mixtral() -> None:
    config = SimpleNamespace(num_experts_per_tok=2, num_local_experts=6, hidden_size=16)
    theirs = fill(MixtralTopKRouter(config)).bfloat16()
    ours = TopKRouter(16, 6, 2, renormalize=True, wide=True).bfloat16()
    ours.load_state_dict(theirs.state_dict())
    bound(ours, torch.bfloat16)
    x = torch.randn(9, 16).bfloat16()
    _, scores, ids = theirs(x)
    weights, chosen = ours(x)
    assert weights.dtype == scores.dtype == torch.float32
    assert torch.equal(chosen, ids) and torch.allclose(weights, scores, rtol=0, atol=1e-6)


def test_an_activation_on_its_own() -> None:
    x = torch.linspace(-6, 6, 101)
    assert torch.equal(bound(Activation("silu"))(x), ACT2FN["silu"](x))
    with pytest.raises(ValueError, match="swoosh"):
        Activation("swoosh")
