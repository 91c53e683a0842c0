"""Routing by a table of token ids against transformers' DeepSeek-V4."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

from rtp_kernel.components import HashRouter, bind_components
from rtp_kernel.registry import OpTable, default_registry

HIDDEN, EXPERTS, TOP_K, VOCABULARY = 24, 7, 3, 31


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("score", ["sqrtsoftplus", "sigmoid"])
def test_routes_as_the_reference(deterministic: bool, score: str) -> None:
    config = DeepseekV4Config(
        hidden_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        vocab_size=VOCABULARY,
        scoring_func=score,
    )
    reference = DeepseekV4HashRouter(config)
    reference.weight.data.normal_()
    reference.tid2eid.copy_(torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(VOCABULARY)]))
    ours = HashRouter(
        HIDDEN, EXPERTS, TOP_K, VOCABULARY, score=score, renormalize=True, renormalize_eps=1e-20, scale=1.5
    )
    ours.load_state_dict(reference.state_dict())
    ops = OpTable(default_registry(), device="cpu", dtype=torch.float32, deterministic=deterministic)
    bind_components(ours, ops, "cpu", torch.float32)
    x, ids = torch.randn(300, HIDDEN), torch.randint(VOCABULARY, (300,))
    with torch.no_grad():
        _, wanted_weights, wanted_ids = reference(x[None], ids[None])
        weights, chosen = ours(x, ids)
    assert torch.equal(chosen, wanted_ids)
    assert torch.allclose(weights, wanted_weights, rtol=1e-5, atol=0)
