"""Routing and experts against transformers' modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, MiniMaxM2Config, Qwen2MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts, Qwen2MoeTopKRouter

from rtp_kernel.ops.moe import experts, route
from rtp_kernel.ops.topk import top_k

EXPERTS, HIDDEN = 16, 32


def _by_id(weights: Tensor, ids: Tensor) -> Tensor:
    """[T, E]: the references leave the order of a token's experts open."""
    return torch.zeros(len(ids), EXPERTS, dtype=weights.dtype).scatter_(1, ids, weights)


def _judge(module: torch.nn.Module, bias: Tensor | None, **options: Any) -> None:
    x = torch.randn(40, HIDDEN)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
        logits, want_weights, want_ids = module(x)
    weights, ids = route(logits, bias, **options)
    assert torch.allclose(_by_id(weights, ids), _by_id(want_weights, want_ids), rtol=0, atol=1e-6)


@pytest.mark.parametrize("renormalize", [False, True])
def test_softmax_routing_is_that_of_qwen(renormalize: bool) -> None:
    config = Qwen2MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=4, norm_topk_prob=renormalize)
    _judge(Qwen2MoeTopKRouter(config), None, k=4, renormalize=renormalize)


def test_grouped_softmax_routing_is_that_of_deepseek_v2() -> None:
    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
    )
    options = {"k": 3, "groups": 4, "top_groups": 2, "group_score": "max", "scale": 1.5}
    _judge(DeepseekV2TopkRouter(config), None, **options)


def test_biased_sigmoid_routing_is_that_of_deepseek_v3() -> None:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    module = DeepseekV3TopkRouter(config)
    module.e_score_correction_bias.copy_(torch.randn(EXPERTS) / 2)
    options = {"score": "sigmoid", "renormalize": True, "renormalize_eps": 1e-20, "scale": 2.5}
    _judge(module, module.e_score_correction_bias, k=4, groups=4, top_groups=2, group_score="top2", **options)


def test_ungrouped_sigmoid_routing_is_that_of_minimax_m2() -> None:
    config = MiniMaxM2Config(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=4)
    module, bias, x = MiniMaxM2TopKRouter(config), torch.randn(EXPERTS) / 2, torch.randn(40, HIDDEN)
    with torch.no_grad():
        module.weight.normal_()
        logits, want_weights, want_ids = module(x, bias)
    weights, ids = route(logits, bias, k=4, score="sigmoid", renormalize=True)
    assert torch.allclose(_by_id(weights, ids), _by_id(want_weights, want_ids), rtol=0, atol=1e-6)


def test_sqrtsoftplus_scores() -> None:
    logits = torch.randn(5, EXPERTS)
    weights, ids = route(logits, None, k=EXPERTS, score="sqrtsoftplus")
    assert torch.allclose(_by_id(weights, ids), torch.log1p(logits.exp()).sqrt(), atol=1e-6)


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(3, EXPERTS)
    logits[1, 9] = logits[1, 4] = 1.0
    ids = route(logits, None, k=3)[1]
    assert ids.tolist() == [[0, 1, 2], [4, 9, 0], [0, 1, 2]]
    grouped = route(torch.zeros(1, EXPERTS), None, k=3, groups=4, top_groups=1)[1]
    assert grouped.tolist() == [[0, 1, 2]]


def test_top_k_ignores_padding_behind() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]])
    padded = torch.cat((values, torch.full((1, 100), float("-inf"))), -1)
    for each in (values, padded):
        best, ids = top_k(each, 4)
        assert (best.tolist(), ids.tolist()) == ([[3.0, 3.0, 3.0, 1.0]], [[1, 2, 4, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_those_of_qwen2_moe(dtype: torch.dtype) -> None:
    config = Qwen2MoeConfig(
        hidden_size=HIDDEN, num_experts=EXPERTS, moe_intermediate_size=32, experts_implementation="eager"
    )
    module = Qwen2MoeExperts(config).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.2)
    x = torch.randn(12, HIDDEN).to(dtype)
    weights, ids = route(torch.randn(12, EXPERTS).to(dtype), None, k=4)
    want = module(x, ids, weights).detach()
    got = experts(x, weights, ids, module.gate_up_proj.detach(), module.down_proj.detach())
    assert torch.equal(got, want)


def test_a_choice_made_elsewhere_is_weighted_as_it_is() -> None:
    """DeepSeek-V4's first layers: the table's experts, in the table's order, with the weights of the gate."""
    logits, ids = torch.randn(6, EXPERTS), torch.randint(EXPERTS, (6, 3))
    options: dict[str, Any] = {"k": 3, "score": "sqrtsoftplus", "renormalize": True, "scale": 1.5}
    weights, found = route(logits, None, ids=ids, **options)
    wanted = torch.nn.functional.softplus(logits).sqrt().gather(1, ids)
    assert torch.equal(found, ids)
    assert torch.allclose(weights, wanted / wanted.sum(-1, keepdim=True) * 1.5, rtol=1e-6)
