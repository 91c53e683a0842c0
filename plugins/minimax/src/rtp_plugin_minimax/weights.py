"""Weight descriptors that the MiniMax models share: attention, experts in both forms, embedding, norms and head."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rtp_runtime.weights import Axis, Concat, Descriptor, FromCheckpoint, Skip, Stack, Tie, Weight

LAYER = "model.layers.{layer}."
ON_HUB = LAYER + "block_sparse_moe."
"""Where released checkpoints keep router and experts."""
IN_MEMORY = LAYER + "mlp."
"""Where transformers keeps them once loaded."""
MULTI_TOKEN = "multi-token prediction: not part of the language model itself"

Layers = Mapping[str, Sequence[int]]


def tensor(name: str, *dims: int | Axis, over: Layers | None = None) -> Weight:
    """A parameter that is one tensor of the checkpoint, under its own name."""
    return Weight(parameter=name, source=FromCheckpoint(name, dims), over=over or {})


def outer_weights(config: Any) -> list[Descriptor]:
    """The norms of every layer, the embedding, the final norm and the head."""
    hidden, layers = config.hidden_size, {"layer": range(config.num_hidden_layers)}
    vocabulary = Axis("vocab", config.vocab_size)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    return [
        tensor(LAYER + "input_layernorm.weight", hidden, over=layers),
        tensor(LAYER + "post_attention_layernorm.weight", hidden, over=layers),
        tensor("model.norm.weight", hidden),
        tensor(embedding, vocabulary, hidden),
        Tie(head, embedding) if config.tie_word_embeddings else tensor(head, vocabulary, hidden),
    ]


def attention_weights(config: Any, head_dim: int, layers: Layers) -> list[Descriptor]:
    """Fused q, k, v in this order, and the output projection; no biases."""
    prefix, hidden = LAYER + "self_attn.", config.hidden_size
    q_heads = Axis("q heads", config.num_attention_heads, head_dim)
    kv_heads = Axis("kv heads", config.num_key_value_heads, head_dim, replicable=True)
    parts = {"q_proj": q_heads, "k_proj": kv_heads, "v_proj": kv_heads}
    qkv = Concat(tuple(FromCheckpoint(f"{prefix}{name}.weight", (axis, hidden)) for name, axis in parts.items()))
    return [
        Weight(parameter=prefix + "qkv_proj.weight", source=qkv, over=layers),
        tensor(prefix + "o_proj.weight", hidden, q_heads, over=layers),
    ]


def hub_expert_weights(config: Any, layers: Layers) -> list[Descriptor]:
    """The router, and one tensor per expert and projection: w1 is the gate, w3 up, w2 down."""
    hidden, experts = config.hidden_size, Axis("experts", config.num_local_experts)
    intermediate = Axis("intermediate", config.intermediate_size)
    gate, up = (FromCheckpoint(f"{ON_HUB}experts.{{expert}}.{w}.weight", (intermediate, hidden)) for w in ("w1", "w3"))
    down = FromCheckpoint(ON_HUB + "experts.{expert}.w2.weight", (hidden, intermediate))
    return [
        _router(FromCheckpoint(ON_HUB + "gate.weight", (experts, hidden)), layers),
        *_experts(Stack(Concat((gate, up)), "expert", experts), Stack(down, "expert", experts), layers),
    ]


def fused_expert_weights(config: Any, layers: Layers) -> list[Descriptor]:
    """The router, and the stacked tensors that transformers holds in memory: gate first, then up."""
    hidden, experts = config.hidden_size, Axis("experts", config.num_local_experts)
    intermediate = Axis("intermediate", config.intermediate_size)
    gate_up = FromCheckpoint(IN_MEMORY + "experts.gate_up_proj", (experts, 2 * intermediate.size, hidden))
    down = FromCheckpoint(IN_MEMORY + "experts.down_proj", (experts, hidden, intermediate))
    return [
        _router(FromCheckpoint(IN_MEMORY + "gate.weight", (experts, hidden)), layers),
        *_experts(gate_up, down, layers),
    ]


def router_bias(config: Any, name: str, layers: Layers) -> Weight:
    """What is added to the scores for the selection; float32, since it is large beside the scores' differences."""
    source = FromCheckpoint(name, (Axis("experts", config.num_local_experts),))
    return Weight(parameter=IN_MEMORY + "gate.e_score_correction_bias", source=source, over=layers, dtype="float32")


def extra_layers(config: Any, prefix: str = "model.") -> Skip:
    """Layers behind the last one; `prefix` is what stands before `layers.` in the checkpoint."""
    known = "|".join(str(layer) for layer in range(config.num_hidden_layers))
    return Skip(rf"{re.escape(prefix)}layers\.(?!(?:{known})\.)\d+\..*", MULTI_TOKEN)


def _router(source: FromCheckpoint, layers: Layers) -> Weight:
    return Weight(parameter=IN_MEMORY + "gate.weight", source=source, over=layers)


def _experts(gate_up: Stack | FromCheckpoint, down: Stack | FromCheckpoint, layers: Layers) -> list[Descriptor]:
    return [
        Weight(parameter=IN_MEMORY + "experts.gate_up_proj", source=gate_up, over=layers),
        Weight(parameter=IN_MEMORY + "experts.down_proj", source=down, over=layers),
    ]
