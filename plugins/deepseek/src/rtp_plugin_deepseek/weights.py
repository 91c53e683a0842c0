"""Weight descriptors that the DeepSeek models share: latent attention, routed and shared experts, what is skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rtp_runtime.weights import (
    Axis,
    Concat,
    Descriptor,
    FromCheckpoint,
    Layout,
    Skip,
    Stack,
    Tie,
    Weight,
    WeightDescriptors,
)

LAYER = "model.layers.{layer}."

Dim = int | Axis
Over = Mapping[str, Sequence[int]]


def all_layers(config: Any) -> Over:
    return {"layer": range(config.num_hidden_layers)}


def plain(name: str, *dims: Dim, over: Over | None = None, dtype: str = "model") -> Weight:
    """A parameter that is one tensor of the checkpoint, under its own name."""
    return Weight(parameter=name, source=FromCheckpoint(name, dims), over=over or {}, dtype=dtype)


def outer_weights(config: Any) -> list[Descriptor]:
    """The norms of every layer, the embedding, the final norm and the head, and what drafts tokens."""
    hidden, layers = config.hidden_size, all_layers(config)
    table: tuple[Dim, ...] = (Axis("vocab", config.vocab_size), hidden)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    return [
        plain(LAYER + "input_layernorm.weight", hidden, over=layers),
        plain(LAYER + "post_attention_layernorm.weight", hidden, over=layers),
        plain("model.norm.weight", hidden),
        plain(embedding, *table),
        Tie(head, embedding) if config.tie_word_embeddings else plain(head, *table),
        skip_predictions(config),
    ]


def skip_predictions(config: Any) -> Skip:
    """The layers that the hub's files hold behind the last one."""
    served = "|".join(str(layer) for layer in range(config.num_hidden_layers))
    return Skip(rf"model\.layers\.(?!(?:{served})\.)\d+\..*", "multi-token prediction, which drafts tokens")


def attention_weights(config: Any) -> list[Descriptor]:
    """Latent attention, with queries of full or of low rank."""
    hidden, layers, prefix = config.hidden_size, all_layers(config), LAYER + "self_attn."
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    rank, q_rank, value = config.kv_lora_rank, config.q_lora_rank, config.v_head_dim
    q_heads = Axis("q heads", heads, nope + rope)
    shapes: dict[str, tuple[Dim, ...]] = {
        "kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (Axis("q heads", heads, nope + value), rank),
        "o_proj.weight": (hidden, Axis("q heads", heads, value)),
    }
    if q_rank is None:
        shapes["q_proj.weight"] = (q_heads, hidden)
    else:
        shapes["q_a_proj.weight"] = (q_rank, hidden)
        shapes["q_a_layernorm.weight"] = (q_rank,)
        shapes["q_b_proj.weight"] = (q_heads, q_rank)
    if config.attention_bias:
        shapes["kv_a_proj_with_mqa.bias"] = (rank + rope,)
        shapes["o_proj.bias"] = (hidden,)
        if q_rank is not None:
            shapes["q_a_proj.bias"] = (q_rank,)
    return [plain(prefix + name, *dims, over=layers) for name, dims in shapes.items()]


def mlp_weights(prefix: str, hidden: int, size: int, over: Over, *, bias: bool = False) -> list[Descriptor]:
    """A gated MLP: gate and up fused in this order."""
    intermediate = Axis("intermediate", size)
    kinds: dict[str, tuple[Dim, ...]] = {"weight": (intermediate, hidden)}
    if bias:
        kinds["bias"] = (intermediate,)
    weights: list[Descriptor] = [
        Weight(
            parameter=f"{prefix}gate_up_proj.{kind}",
            source=Concat(tuple(FromCheckpoint(f"{prefix}{name}.{kind}", dims) for name in ("gate_proj", "up_proj"))),
            over=over,
        )
        for kind, dims in kinds.items()
    ]
    weights.append(plain(prefix + "down_proj.weight", hidden, intermediate, over=over))
    if bias:
        weights.append(plain(prefix + "down_proj.bias", hidden, over=over))
    return weights


def moe_weights(
    config: Any, sparse: Sequence[int], *, mlp_bias: bool = False, router_bias: bool = False
) -> list[Descriptor]:
    """Dense MLPs, and of the layers `sparse` shared experts and router, whose numbers stay in float32."""
    hidden, experts, prefix = config.hidden_size, config.n_routed_experts, LAYER + "mlp."
    dense = {"layer": [layer for layer in range(config.num_hidden_layers) if layer not in sparse]}
    routed = {"layer": list(sparse)}
    shared = config.moe_intermediate_size * config.n_shared_experts
    weights = [
        *mlp_weights(prefix, hidden, config.intermediate_size, dense, bias=mlp_bias),
        *mlp_weights(prefix + "shared_experts.", hidden, shared, routed, bias=mlp_bias),
        plain(prefix + "gate.weight", experts, hidden, over=routed, dtype="float32"),
    ]
    if router_bias:
        weights.append(plain(prefix + "gate.e_score_correction_bias", experts, over=routed, dtype="float32"))
    return weights


def with_experts(config: Any, common: Sequence[Descriptor], sparse: Sequence[int]) -> WeightDescriptors:
    """`common` with the routed experts: one tensor per expert as on the hub, or stacked as transformers holds them."""
    over, prefix = {"layer": list(sparse)}, LAYER + "mlp.experts."
    hidden, experts = config.hidden_size, Axis("experts", config.n_routed_experts)
    intermediate = Axis("intermediate", config.moe_intermediate_size)
    gate, up = (
        FromCheckpoint(f"{prefix}{{expert}}.{name}.weight", (intermediate, hidden)) for name in ("gate_proj", "up_proj")
    )
    down = FromCheckpoint(prefix + "{expert}.down_proj.weight", (hidden, intermediate))
    released = (
        Weight(parameter=prefix + "gate_up_proj", source=Stack(Concat((gate, up)), "expert", experts), over=over),
        Weight(parameter=prefix + "down_proj", source=Stack(down, "expert", experts), over=over),
    )
    stacked = (
        plain(prefix + "gate_up_proj", experts, 2 * intermediate.size, hidden, over=over),
        plain(prefix + "down_proj", experts, hidden, intermediate, over=over),
    )
    return WeightDescriptors(*common, *released, others=[Layout("stacked experts", (*common, *stacked))])
