"""The seeded faults: how each enters, which row of the field's faults it stands for, and what the checker must say.

`effect` is the fault's relative error in float32 at the accused module, as the check measures it; infinite where
nothing can be compared (a tensor, module or number that is not there) or a value is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It enters through exactly one of the last fields."""

    name: str
    row: str
    """The kind of fault in the field."""
    stage: str
    """The stage that catches it."""
    at: str
    """The accused module; inside the layers without their prefix."""
    effect: float
    base: str
    """The tiny checkpoint it is put into."""
    layer: int | None = None
    """Of a module outside the layers: the first layer that consumes its output."""
    model: str = ""
    """Class of a faulty copy of the plugin's model."""
    weights: str = ""
    """Expression of `check_faults.descriptors` that edits the plugin's descriptors."""
    op: tuple[str, str] = ("", "")
    """Op and class of a faulty implementation."""
    engine: tuple[str, str] = ("", "")
    """Name to replace in the engine, and class of `check_faults.engine`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Config values of our copy of the checkpoint."""
    tensors: Callable[[Tensors], None] | None = None
    """Edit of the tensors of our copy of the checkpoint."""
    cause: str = ""
    """The mistake that should be named (`Cause.kind`); empty where "no known cause" is right."""

    @property
    def entry(self) -> str:
        """The field through which it enters."""
        ways = {"model": self.model, "weights": self.weights, "op": self.op[0], "engine": self.engine[0]}
        ways |= {"config": self.config, "tensors": self.tensors}
        (entry,) = [name for name, way in ways.items() if way]
        return entry

    @property
    def place(self) -> tuple[str, int | None]:
        """The accused module by the reference's dotted name, and the layer."""
        if not self.at[0].isdigit():
            return self.at, self.layer
        return f"model.layers.{self.at}", int(self.at.split(".")[0])


def rename(old: str, new: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[new] = tensors.pop(old)

    return edit


def exchange(one: str, other: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return edit


def scale(name: str, factor: float, place: int | None = None) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        part = tensors[name] if place is None else tensors[name][place]
        part.mul_(factor)

    return edit


def exchange_experts(tensors: Tensors) -> None:
    for projection in ("gate_proj", "up_proj", "down_proj"):
        prefix = "model.layers.2.mlp.experts."
        exchange(f"{prefix}3.{projection}.weight", f"{prefix}5.{projection}.weight")(tensors)


def permute_rows(tensors: Tensors) -> None:
    name = "model.layers.2.self_attn.v_proj.weight"
    tensors[name] = tensors[name].roll(16, dims=0)


def rope(theta: float = 1e6, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


FULL, SLIDING = "full_attention", "sliding_attention"
qwen2, qwen2_moe = partial(Fault, base="qwen2"), partial(Fault, base="qwen2_moe")
qwen3, qwen3_moe = partial(Fault, base="qwen3"), partial(Fault, base="qwen3_moe")

FAULTS = (
    # Fused layouts, through descriptors and through tensors
    qwen3(
        "qkv_order",
        "fused qkv in the wrong order",
        "probes",
        "0.self_attn.q_proj",
        0.9,
        weights="change('qkv_proj.weight', swapped)",
    ),
    qwen2(
        "qkv_interleave",
        "fused qkv interleaved",
        "probes",
        "0.self_attn.q_proj",
        0.9,
        weights="change('qkv_proj.weight', interleaved)",
    ),
    qwen2(
        "gate_up_order",
        "gate and up swapped",
        "probes",
        "0.mlp.gate_proj",
        1,
        weights="change('mlp.gate_up_proj.weight', swapped)",
    ),
    qwen3_moe(
        "expert_gate_up_order",
        "gate and up swapped",
        "probes",
        "0.mlp.experts",
        0.86,
        weights="change('experts.gate_up_proj', swapped)",
    ),
    qwen2("permuted_rows", "fused qkv interleaved", "probes", "2.self_attn.v_proj", 1.6, tensors=permute_rows),
    qwen3("mixed_value_heads", "per-head layout", "probes", "2.self_attn", 1.5, model="qwen3:MixedValueHeads"),
    # Biases and parameters that are lost
    qwen2("skipped_biases", "dropped bias", "audit", "0.self_attn.q_proj", math.inf, weights="drop_biases"),
    qwen2(
        "zeroed_bias",
        "dropped bias",
        "probes",
        "1.self_attn.k_proj",
        0.17,
        tensors=scale("model.layers.1.self_attn.k_proj.bias", 0.0),
    ),
    qwen2(
        "one_bias_value",
        "dropped bias",
        "probes",
        "3.self_attn.v_proj",
        5.9e-05,
        tensors=scale("model.layers.3.self_attn.v_proj.bias", 1.005, place=5),
    ),
    qwen3("never_written", "a parameter never written", "probes", "1.mlp", math.inf, model="qwen3:NeverWritten"),
    qwen3(
        "renamed_tensor",
        "renamed checkpoint tensors",
        "audit",
        "1.self_attn.q_norm",
        math.inf,
        tensors=rename("model.layers.1.self_attn.q_norm.weight", "model.layers.1.self_attn.query_norm.weight"),
    ),
    qwen3_moe("tied_head", "output head tied when it is not", "audit", "lm_head", math.inf, weights="tie_head"),
    qwen3("untied_head", "output head not tied when it is", "audit", "lm_head", math.inf, weights="untie_head"),
    qwen2("tie_flag", "flag of the tied head", "audit", "lm_head", math.inf, config={"tie_word_embeddings": False}),
    # Rotary embedding
    qwen3(
        "interleaved_rotary",
        "rope: half-split against interleaved",
        "probes",
        "0.self_attn",
        0.91,
        model="qwen3:InterleavedRotary",
    ),
    qwen3(
        "partial_rotary",
        "rope: partial factor wrong",
        "pinned",
        "model.rotary_emb",
        math.inf,
        layer=0,
        model="qwen3:HalfRotated",
    ),
    qwen2(
        "theta",
        "rope: theta fell back to a default",
        "pinned",
        "model.rotary_emb",
        0.154,
        layer=0,
        config=rope(10000.0),
    ),
    qwen3(
        "theta_a_little",
        "rope: theta fell back to a default",
        "pinned",
        "model.rotary_emb",
        1.04e-05,
        layer=0,
        config=rope(1000000.0 * 1.0003),
    ),
    qwen3(
        "yarn_twice",
        "rope: yarn applied twice",
        "pinned",
        "model.rotary_emb",
        0.137,
        layer=0,
        config=rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    qwen3(
        "narrow_table",
        "rope table in a low precision",
        "pinned",
        "model.rotary_emb",
        0.00028,
        layer=0,
        model="qwen3:NarrowTable",
    ),
    qwen3(
        "narrow_angles",
        "rope angles in a low precision",
        "probes",
        "model.rotary_emb",
        0.00086,
        layer=0,
        model="qwen3:NarrowAngles",
    ),
    # Router and experts
    qwen3_moe(
        "not_renormalised",
        "router: weights renormalised or not",
        "probes",
        "2.mlp.gate",
        0.45,
        model="qwen3_moe:NoRenormalisation",
    ),
    qwen2_moe(
        "renormalised",
        "router: weights renormalised or not",
        "probes",
        "0.mlp.gate",
        0.68,
        config={"norm_topk_prob": True},
    ),
    qwen3_moe(
        "narrow_router", "router in a low precision", "probes", "0.mlp.gate", 0.0022, model="qwen3_moe:RouterInBfloat16"
    ),
    qwen3_moe(
        "router_weight",
        "router in a low precision",
        "probes",
        "2.mlp.gate",
        2.9e-05,
        tensors=scale("model.layers.2.mlp.gate.weight", 1.0001),
    ),
    qwen3_moe("expert_order", "expert order", "probes", "0.mlp.experts", 1.56, model="qwen3_moe:ExpertOrder"),
    qwen3_moe("exchanged_experts", "expert order", "probes", "2.mlp.experts", 0.79, tensors=exchange_experts),
    qwen2_moe(
        "no_shared_gate",
        "shared expert without its gate",
        "probes",
        "2.mlp.shared_expert_gate",
        0.86,
        model="qwen2_moe:NoSharedGate",
    ),
    qwen2_moe("leaky_block", "residual scale", "probes", "0.mlp", 2.15e-05, model="qwen2_moe:LeakyBlock"),
    qwen3_moe(
        "one_expert",
        "a damaged weight",
        "probes",
        "2.mlp.experts",
        4e-4,
        tensors=scale("model.layers.2.mlp.experts.1.down_proj.weight", 1.001),
    ),
    qwen2_moe(
        "shared_gate_weight",
        "a damaged weight",
        "probes",
        "0.mlp.shared_expert_gate",
        1e-3,
        tensors=scale("model.layers.0.mlp.shared_expert_gate.weight", 1.001),
    ),
    # Norms
    qwen3(
        "norm_plus_one", "norm: w against 1+w", "probes", "1.post_attention_layernorm", 0.95, model="qwen3:NormPlusOne"
    ),
    qwen3(
        "whole_vector_norm",
        "norm: per head against whole vector",
        "probes",
        "0.self_attn.q_norm",
        0.104,
        model="qwen3:NormOverAllHeads",
    ),
    qwen2("all_eps", "norm: eps", "probes", "0.input_layernorm", 0.0123, config={"rms_norm_eps": 1e-05}),
    qwen3("one_eps", "norm: eps", "probes", "2.post_attention_layernorm", 8.8e-06, model="qwen3:NormEps"),
    qwen3("final_eps", "norm: eps", "probes", "model.norm", 6.9e-06, model="qwen3:FinalNormEps"),
    qwen3("key_norm_eps", "norm: eps", "probes", "1.self_attn.k_norm", 1.5e-5, model="qwen3:KeyNormEps"),
    qwen2(
        "one_norm_value",
        "norm weight",
        "probes",
        "1.post_attention_layernorm",
        3e-5,
        tensors=scale("model.layers.1.post_attention_layernorm.weight", 1.0003, place=5),
    ),
    # Attention
    qwen2(
        "one_output_row",
        "a damaged weight",
        "probes",
        "3.self_attn.o_proj",
        1e-4,
        tensors=scale("model.layers.3.self_attn.o_proj.weight", 1.001, place=7),
    ),
    qwen3("attention_scale", "attention scale", "probes", "1.self_attn", 2e-05, model="qwen3:AttentionScale"),
    qwen2("window_off_by_one", "window off by one", "probes", "2.self_attn", 0.2, config={"sliding_window": 9}),
    qwen2("all_full", "layer types ignored", "probes", "2.self_attn", 0.6, config={"layer_types": [FULL] * 4}),
    qwen2("all_sliding", "layer types ignored", "probes", "0.self_attn", 0.78, config={"layer_types": [SLIDING] * 4}),
    qwen3(
        "head_dim", "head_dim taken as hidden / heads", "audit", "0.self_attn.q_proj", math.inf, config={"head_dim": 16}
    ),
    qwen3(
        "tiled_heads",
        "grouped heads repeated in the wrong order",
        "probes",
        "0.self_attn",
        1,
        op=("paged_attention", "TiledHeads"),
    ),
    qwen3(
        "narrow_softmax",
        "softmax in a low precision",
        "probes",
        "0.self_attn",
        0.0022,
        op=("paged_attention", "NarrowSoftmax"),
    ),
    # Scales and activations
    qwen3("embedding_scale", "embedding scale", "probes", "model", 0.0001, layer=0, model="qwen3:EmbeddingScale"),
    qwen3("residual_scale", "residual scale", "probes", "1", 0.00034, model="qwen3:ResidualScale"),
    qwen3("logit_scale", "logit scale", "probes", "lm_head", 5e-05, model="qwen3:LogitScale"),
    qwen3("activation", "activation: gelu for silu", "probes", "2.mlp", 0.166, model="qwen3:WrongActivation"),
    # The engine: only under load, or only in what leaves it
    qwen3(
        "blind_chunks",
        "chunked prefill changes the result",
        "modes",
        "0.self_attn",
        0.52,
        op=("paged_attention", "BlindToEarlierChunks"),
    ),
    qwen2(
        "decode_window",
        "decode differs from prefill",
        "modes",
        "2.self_attn",
        0.137,
        op=("paged_attention", "OneMoreInDecode"),
    ),
    qwen3(
        "mixed_batch",
        "mixed batch changes the result",
        "modes",
        "0.self_attn",
        0.103,
        op=("paged_attention", "BlindInCompany"),
    ),
    qwen3(
        "positions_restart",
        "chunked prefill changes the result",
        "modes",
        "model.rotary_emb",
        0.38,
        layer=0,
        engine=("engine.runner.BatchBuilder", "PositionsRestart"),
    ),
    qwen3(
        "stale_preemption",
        "preemption changes the result",
        "modes",
        "model.embed_tokens",
        0.24,
        engine=("engine.runner.BatchBuilder", "StaleAfterPreemption"),
    ),
    qwen3("second_best", "sampler", "greedy", "lm_head", 0.128, engine=("engine.runner.Sampler", "SecondBest")),
    qwen3(
        "shifted_logits", "logit scale", "logits", "lm_head", 0.001, engine=("engine.engine.Runner", "ShiftedLogits")
    ),
)
