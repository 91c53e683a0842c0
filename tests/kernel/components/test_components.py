"""Components: unbound, bound on the meta device and prepared, against transformers' modules."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DeepseekV3Config, LlamaConfig, Qwen2MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts, Qwen2MoeSparseMoeBlock, Qwen2MoeTopKRouter

from rtp_kernel.backends.cpu.linear import PackedLinear
from rtp_kernel.components import (
    Attention,
    Embedding,
    Experts,
    Gate,
    GatedMLP,
    LayerNorm,
    Linear,
    MergedLinear,
    RMSNorm,
    RopeParameters,
    Rotary,
    RotaryEmbedding,
    TopKRouter,
    bind_components,
    prepare_components,
)
from rtp_kernel.registry import (
    OpContext,
    OpFunction,
    OpRegistry,
    OpSelectionError,
    OpTable,
    Support,
    default_registry,
)

LLAMA = LlamaConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4, head_dim=8, mlp_bias=True)


class Packed(PackedLinear):
    """Taken for float32 too, so that preparing is held to float32's accuracy."""

    def supports(self, context: OpContext) -> Support:
        return Support.unless(context.deterministic and "its result for a row depends on the number of rows")


def _registry() -> OpRegistry:
    registry = default_registry()
    registry.add("linear", Packed())
    return registry


def _bound(module: nn.Module, dtype: torch.dtype = torch.float32, **options: Any) -> OpTable:
    table = OpTable(_registry(), device="cpu", dtype=dtype, **options)
    bind_components(module, table, "cpu", dtype)
    return table


def _fill(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


class Block(nn.Module):
    """One of each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = Embedding(20, 32)
        self.norm = RMSNorm(32, 1e-6)
        self.shifted_norm = RMSNorm(32, 1e-6, offset=1.0)
        self.k_norm = LayerNorm(32, 1e-6)
        self.rotary_emb = RotaryEmbedding(8, RopeParameters(theta=1e4))
        self.rotary = Rotary("half")
        self.qkv_proj = MergedLinear(32, {"q_proj": 32, "k_proj": 16, "v_proj": 16}, bias=True)
        self.attn = Attention(4, 2, 8)
        self.mlp = GatedMLP(32, 48, bias=True)
        self.gate = TopKRouter(32, 4, 2, renormalize=True, bias=True, dtype=torch.float32)
        self.experts = Experts(4, 32, 16)


def test_a_gate_of_one_column_is_that_of_qwen2_moe_and_row_independent() -> None:
    block = Qwen2MoeSparseMoeBlock(
        Qwen2MoeConfig(hidden_size=20, moe_intermediate_size=8, shared_expert_intermediate_size=8, num_experts=4)
    )
    _fill(block.shared_expert_gate)
    x, shared = torch.randn(2, 37, 20)
    gate = Gate("sigmoid")
    expected = functional.sigmoid(block.shared_expert_gate(x)) * shared
    assert torch.allclose(gate(block.shared_expert_gate(x), shared), expected, rtol=0, atol=1e-7)
    _bound(gate, deterministic=True)
    column = block.shared_expert_gate(x)
    whole = gate(column, shared)
    assert all(torch.equal(gate(column[row : row + 1], shared[row : row + 1])[0], whole[row]) for row in range(37))


@pytest.mark.parametrize("state", ["unbound", "bound", "prepared", "freed", "unprepared", "deterministic"])
def test_the_gated_mlp_is_that_of_llama_in_every_state(state: str) -> None:
    theirs = _fill(LlamaMLP(LLAMA))
    ours = GatedMLP(32, 48, LLAMA.hidden_act, bias=True)
    weights = theirs.state_dict()
    for kind in ("weight", "bias"):
        gate_up = torch.cat((weights[f"gate_proj.{kind}"], weights[f"up_proj.{kind}"]))
        ours.load_state_dict(
            {f"gate_up_proj.{kind}": gate_up, f"down_proj.{kind}": weights[f"down_proj.{kind}"]}, strict=False
        )
    if state != "unbound":
        _bound(ours, deterministic=state == "deterministic")
    if state in ("prepared", "freed", "unprepared", "deterministic"):
        prepare_components(ours, free=state in ("freed", "unprepared"))
    if state == "unprepared":
        for part in (ours.gate_up_proj, ours.down_proj):
            part.unprepare()
    x = torch.randn(5, 32)
    assert torch.allclose(ours(x), theirs(x).detach(), rtol=0, atol=1e-6)
    assert torch.equal(ours.down_proj.logical("weight"), weights["down_proj.weight"])
    assert ours.down_proj.weight.is_meta == (state == "freed")
    assert {name for name, _ in ours.named_parameters()} == {
        f"{module}.{kind}" for module in ("gate_up_proj", "down_proj") for kind in ("weight", "bias")
    }


def test_merged_outputs_are_the_parts_in_order() -> None:
    merged = _fill(MergedLinear(32, {"q_proj": 8, "k_proj": 4, "v_proj": 2}))
    x = torch.randn(3, 32)
    whole = x @ merged.weight.T
    assert [part.shape[-1] for part in merged(x)] == [8, 4, 2]
    assert torch.equal(torch.cat(merged(x), -1), merged.project(x))
    assert torch.allclose(merged.project(x), whole, atol=1e-6)
    assert list(merged.parts) == ["q_proj", "k_proj", "v_proj"]


def test_a_shared_weight_is_kept_when_others_are_freed() -> None:
    module = nn.ModuleDict({"embed": Embedding(20, 32), "head": Linear(32, 20), "other": Linear(32, 8)})
    module["head"].weight = module["embed"].weight
    _fill(module)
    _bound(module)
    prepare_components(module, free=True)
    assert not module["embed"].weight.is_meta
    assert module["other"].weight.is_meta
    x = torch.randn(2, 32)
    assert torch.allclose(module["head"](x), x @ module["embed"].weight.T, atol=1e-5)


def test_what_does_not_fit_in_memory_stays_as_it_is() -> None:
    layers = _fill(nn.Sequential(Linear(32, 32), Linear(32, 32), Linear(32, 32)))
    x = torch.randn(4, 32)
    want = layers(x)
    _bound(layers)
    prepare_components(layers, memory=2 * layers[0].prepared_bytes())
    assert [layer._prepared is not None for layer in layers] == [True, True, False]
    assert torch.allclose(layers(x), want, atol=1e-4)


def test_a_prepared_weight_follows_a_second_prepare_only() -> None:
    layer = _fill(Linear(32, 8))
    _bound(layer)
    layer.prepare()
    x, before = torch.randn(2, 32), layer.weight.clone()
    layer.weight.data.mul_(2)
    assert torch.allclose(layer(x), x @ before.T, atol=1e-5)
    layer.prepare()
    assert torch.allclose(layer(x), x @ before.T * 2, atol=1e-5)


def test_a_block_is_built_on_the_meta_device_and_bound_with_buffers() -> None:
    with torch.device("meta"):
        block = Block()
    assert all(parameter.is_meta for parameter in block.parameters())
    names = [name for name, _ in block.named_parameters()]
    block = block.to_empty(device="cpu").to(torch.bfloat16)
    table = _bound(block, torch.bfloat16)
    assert [name for name, _ in block.named_parameters()] == names
    assert block.rotary_emb.inv_freq.dtype == torch.float32
    assert not block.rotary_emb.inv_freq.is_meta
    assert "rotary_emb.inv_freq" not in block.state_dict()
    assert {choice.op for choice in table.choices} <= set(default_registry().ops())
    assert {choice.component for choice in table.choices if choice.op == "paged_attention"} == {"attn"}
    assert [choice.regime for choice in table.choices if choice.op == "paged_attention"] == [
        "decode",
        "verify",
        "prefill",
    ]


def test_pinned_dtypes_survive_the_model_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        block = Block()
    finally:
        torch.set_default_dtype(before)
    assert block.gate.weight.dtype == block.gate.e_score_correction_bias.dtype == torch.float32
    assert block.qkv_proj.weight.dtype == torch.bfloat16
    assert block.rotary_emb.inv_freq.dtype == torch.float32
    assert block.rotary_emb(torch.arange(3))[0].dtype == torch.bfloat16


def test_deterministic_binding_names_the_op_that_cannot() -> None:
    with torch.device("meta"):
        block = Block()
    with pytest.raises(OpSelectionError, match='no deterministic implementation of op "linear" for cuda'):
        bind_components(
            block.qkv_proj,
            OpTable(default_registry(), device="cuda", dtype=torch.float32, deterministic=True),
            "cpu",
            torch.float32,
        )


def test_the_angles_are_those_of_llama() -> None:
    ours = RotaryEmbedding(8, RopeParameters.from_dict(LLAMA.rope_parameters))
    positions = torch.arange(7) * 100
    for got, want in zip(ours(positions), LlamaRotaryEmbedding(LLAMA)(torch.zeros(1), positions[None]), strict=True):
        assert torch.equal(got, want[0])


@pytest.mark.parametrize("bound", [False, True])
def test_router_and_experts_are_those_of_qwen2_moe(bound: bool) -> None:
    config = Qwen2MoeConfig(
        hidden_size=32, num_experts=8, moe_intermediate_size=16, num_experts_per_tok=3, experts_implementation="eager"
    )
    router, their_experts = _fill(Qwen2MoeTopKRouter(config)), _fill(Qwen2MoeExperts(config))
    ours = nn.ModuleDict({"gate": TopKRouter(32, 8, 3, renormalize=False), "experts": Experts(8, 32, 16)})
    ours["gate"].load_state_dict(router.state_dict())
    ours["experts"].load_state_dict(their_experts.state_dict())
    if bound:
        _bound(ours)
    x = torch.randn(9, 32)
    weights, ids = ours["gate"](x)
    _, their_weights, their_ids = router(x)
    assert torch.equal(ids, their_ids)
    assert torch.allclose(weights, their_weights.detach(), atol=1e-6)
    want = their_experts(x, their_ids, their_weights).detach()
    assert torch.allclose(ours["experts"](x, weights, ids), want, rtol=0, atol=2e-6)


def test_a_pinned_router_computes_in_float32() -> None:
    config = DeepseekV3Config(
        hidden_size=32, n_routed_experts=8, num_experts_per_tok=3, n_group=2, topk_group=1, num_attention_heads=4
    )
    theirs = DeepseekV3TopkRouter(config)
    theirs.weight.data.normal_()
    theirs.e_score_correction_bias.normal_()
    ours = TopKRouter(
        32,
        8,
        3,
        score="sigmoid",
        renormalize=config.norm_topk_prob,
        renormalize_eps=1e-20,
        scale=config.routed_scaling_factor,
        bias=True,
        groups=2,
        top_groups=1,
        dtype=torch.float32,
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(9, 32).bfloat16()
    weights, ids = ours(x)
    _, their_weights, their_ids = theirs(x)
    assert weights.dtype == torch.float32
    assert torch.equal(ids.sort(-1).values, their_ids.sort(-1).values)
    assert torch.allclose(weights.sort(-1).values, their_weights.detach().sort(-1).values, atol=1e-6)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"soft_cap": 3.0}, {"window": 4}, {"scale": 0.1}])
def test_attention_bound_is_attention_unbound(mix: Any, deterministic: bool, options: dict[str, Any]) -> None:
    step = mix(requests=[(9, 1), (2, 1), (5, 4), (0, 6)], window=options.get("window"), padding=2)
    plain, bound = Attention(4, 2, 16, **options), Attention(4, 2, 16, **options)
    for module in (plain, bound):
        if module.sinks is not None:
            module.sinks.data.copy_(step.sinks)
    _bound(bound, deterministic=deterministic)
    results = []
    for module in (plain, bound):
        batch, kv = step.build(poison=float("nan"))
        results.append(module(step.q, step.new(step.k), step.new(step.v), batch, kv))
    assert results[0].shape == (step.num_tokens, 64)
    assert torch.allclose(results[0], results[1], rtol=0, atol=2e-6)
    assert not options.keys() - {"window"} or not torch.allclose(results[0], step.dense().flatten(1), atol=1e-3)


def test_layers_of_a_step_share_plans_and_groups_do_not(mix: Any) -> None:
    layers = nn.ModuleList(Attention(4, 2, 16) for _ in range(3))
    table = _bound(layers)
    step = mix(requests=[(9, 1), (5, 4)])
    batch, kv = step.build()
    for layer in layers:
        layer(step.q, step.new(step.k), step.new(step.v), batch, kv)
    assert len(table.plans._latest[1]) == 1
    other, other_kv = step.build(order=1)
    got = layers[0](step.q, step.new(step.k), step.new(step.v), other, other_kv)
    assert torch.allclose(got, step.dense().flatten(1), rtol=0, atol=2e-6)


def test_zero_tokens_are_legal(mix: Any) -> None:
    attention = Attention(4, 2, 16)
    _bound(attention)
    step = mix(requests=[])
    batch, kv = step.build()
    assert attention(step.q, step.new(step.k), step.new(step.v), batch, kv).shape == (0, 64)


def test_a_recording_table_sees_every_op() -> None:
    class Recording(OpTable):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.seen: list[tuple[str, str, Tensor]] = []

        def select(self, component: str, op: str, **options: Any) -> OpFunction:
            inner = super().select(component, op, **options)

            @functools.wraps(inner)
            def recorded(*arguments: Any, **keywords: Any) -> Any:
                result = inner(*arguments, **keywords)
                self.seen.append((component, op, result))
                return result

            return recorded

    mlp = _fill(GatedMLP(32, 48))
    table = Recording(_registry(), device="cpu", dtype=torch.float32)
    bind_components(mlp, table, "cpu", torch.float32)
    prepare_components(mlp)
    out = mlp(torch.randn(3, 32))
    assert [(component, op) for component, op, _ in table.seen] == [
        ("gate_up_proj", "linear"),
        ("", "gated_activation"),
        ("down_proj", "linear"),
    ]
    assert table.seen[-1][2] is out
    assert mlp.down_proj._prepared is not None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Attention(6, 4, 8), "6 query heads cannot share 4 key heads"),
        (lambda: Attention(4, 4, 8, window=0), "attention window 0: at least 1"),
        (lambda: Rotary("diagonal"), 'rotary layout "diagonal" is unknown; known: half'),
        (lambda: GatedMLP(8, 8, "prelu"), 'activation "prelu" is unknown'),
        (lambda: TopKRouter(8, 4, 5, renormalize=True), "5 experts per token of 4"),
        (lambda: TopKRouter(8, 4, 2, score="argmax", renormalize=True), 'router score "argmax"'),
    ],
)
def test_arguments_that_cannot_be_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_layer_norm_may_have_no_parameters() -> None:
    norm = LayerNorm(16, 1e-5, bias=False, weight=False)
    x = torch.randn(3, 16)
    assert not list(norm.parameters())
    torch.testing.assert_close(norm(x), torch.nn.LayerNorm(16, 1e-5, elementwise_affine=False)(x))
