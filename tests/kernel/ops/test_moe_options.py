"""Routing by capped or biased logits, and experts with biases, against transformers' modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GptOssConfig, Kolibri1Config, LagunaConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.kolibri1.modeling_kolibri1 import Kolibri1TopKRouter
from transformers.models.laguna.modeling_laguna import LagunaTopKRouter
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from rtp_kernel.backends.cpu.moe import GroupedExperts
from rtp_kernel.backends.cpu.rows import TiledExperts
from rtp_kernel.components import Experts, TopKRouter
from rtp_kernel.ops.moe import experts, route

EXPERTS, HIDDEN, K = 8, 32, 3


@torch.no_grad()
def _judge(module: Any, **options: Any) -> None:
    """The component with the module's parameters chooses and weights as the module does."""
    router = TopKRouter(HIDDEN, EXPERTS, K, renormalize=True, **options)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensor.copy_(torch.randn(tensor.shape) * 0.7)
        getattr(router, name).copy_(tensor)
    x = torch.randn(40, HIDDEN)
    _, want_weights, want_ids = module(x)
    weights, ids = router(x)
    assert torch.allclose(_by_id(weights, ids), _by_id(want_weights, want_ids), rtol=0, atol=1e-6)


def _by_id(weights: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(len(ids), EXPERTS).scatter_(1, ids, weights)


def test_a_gate_with_bias_is_gpt_oss() -> None:
    config = GptOssConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=K)
    _judge(GptOssTopKRouter(config), gate_bias=True)


def test_capped_logits_are_lagunas() -> None:
    config = LagunaConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=K)
    config.moe_router_logit_softcapping = 2.0
    _judge(LagunaTopKRouter(config), score="sigmoid", bias=True, soft_cap=2.0)


def test_a_choice_by_biased_logits_is_kolibris() -> None:
    config = Kolibri1Config(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=K)
    config.norm_topk_prob = True
    _judge(Kolibri1TopKRouter(config), score="sigmoid", bias=True, choose_by="logits")


@torch.no_grad()
def test_the_sparse_mixer_is_that_of_phimoe() -> None:
    """Logits near each other, so that the softmax is over several experts."""
    logits = torch.randn(60, EXPERTS).mul(0.1).add(1)
    want_weights, want_ids = sparsemixer(logits, jitter_eps=0.02, training=False)
    weights, ids = route(logits, None, k=2, score="sparsemixer", jitter=0.02)
    assert torch.equal(ids, want_ids) and torch.equal(weights, want_weights)
    assert len(set(weights.flatten().tolist())) > 10


@torch.no_grad()
def test_experts_with_biases_are_gpt_oss() -> None:
    """Its tensors hold gate and up in turns, and inputs before outputs."""
    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=16, num_local_experts=EXPERTS)
    config._experts_implementation = "eager"
    module = GptOssExperts(config)
    for parameter in module.parameters():
        parameter.normal_(std=0.5)
    ours = Experts(EXPERTS, HIDDEN, 16, "swiglu_oai", limit=module.limit, alpha=module.alpha, bias=True)
    for name, tensor in module.named_parameters():
        tensor = tensor.transpose(1, 2) if tensor.ndim == 3 else tensor
        halves = torch.cat((tensor[:, ::2], tensor[:, 1::2]), dim=1) if name.startswith("gate_up") else tensor
        getattr(ours, name).copy_(halves)
    x, weights, ids = torch.randn(20, HIDDEN), torch.rand(20, K), torch.rand(20, EXPERTS).argsort(-1)[:, :K]
    wanted = module(x, ids, weights)
    assert torch.allclose(ours(x, weights, ids), wanted, atol=1e-5)
    options: Any = {"activation": "swiglu_oai", "limit": module.limit, "alpha": module.alpha}
    biases: Any = {"gate_up_bias": ours.gate_up_proj_bias, "down_bias": ours.down_proj_bias}
    for implementation in (experts, GroupedExperts(), TiledExperts()):
        found = implementation(x, weights, ids, ours.gate_up_proj, ours.down_proj, **options, **biases)
        assert torch.allclose(found, wanted, atol=1e-5)
