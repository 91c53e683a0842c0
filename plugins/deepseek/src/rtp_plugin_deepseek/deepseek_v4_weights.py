"""Weight descriptors of DeepSeek-V4, under the three sets of names in which its checkpoints exist."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
ATTENTION, MOE = LAYER + "self_attn.", LAYER + "mlp."

Names = tuple[tuple[str, str], ...]
"""(part of a name in transformers' module tree, what stands for it in a checkpoint), replaced in this order."""
Shapes = Mapping[str, tuple[int | Axis, ...]]

IN_LAYERS: Names = (
    ("self_attn.compressor.indexer.scorer.", "attn.indexer."),
    ("self_attn.compressor.indexer.q_b_proj", "attn.indexer.wq_b"),
    ("self_attn.compressor.indexer.", "attn.indexer.compressor."),
    ("self_attn.", "attn."),
    ("q_a_proj", "wq_a"),
    ("q_a_norm", "q_norm"),
    ("q_b_proj", "wq_b"),
    ("o_a_proj", "wo_a"),
    ("o_b_proj", "wo_b"),
    ("sinks", "attn_sink"),
    ("position_bias", "ape"),
    ("compressor.kv_norm", "compressor.norm"),
    ("mlp.", "ffn."),
    ("e_score_correction_bias", "bias"),
    ("shared_experts.gate_proj", "shared_experts.w1"),
    ("shared_experts.down_proj", "shared_experts.w2"),
    ("shared_experts.up_proj", "shared_experts.w3"),
    ("kv_proj", "wkv"),
    ("gate_proj", "wgate"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("attn_hc.", "hc_attn_"),
    ("ffn_hc.", "hc_ffn_"),
    ("lm_head", "head"),
)
RELEASED: Names = (*IN_LAYERS, ("model.embed_tokens", "embed"), ("model.hc_head.hc_", "hc_head_"), ("model.", ""))
"""As on the hub."""
SAVED: Names = (*IN_LAYERS, ("attn.kv_norm", "attn.norm"))
"""As transformers' `save_pretrained` writes them: the hub's in the layers, its own around them."""
RUNTIME: Names = ()
"""As transformers holds them in memory."""


@dataclass(frozen=True, slots=True)
class Namer:
    """Makes descriptors of parameters whose checkpoint tensors go by other names."""

    names: Names

    def tensor(self, parameter: str, dims: tuple[int | Axis, ...]) -> FromCheckpoint:
        """The checkpoint tensor of what is called `parameter` in transformers' module tree."""
        name = parameter
        for old, new in self.names:
            name = name.replace(old, new)
        return FromCheckpoint(name, dims)

    def plain(self, shapes: Shapes, over: Iterable[int] | None = None, dtype: str = "model") -> list[Descriptor]:
        """Parameters that are one tensor each, by name; `over` the layers that have them."""
        layers = {} if over is None else {"layer": list(over)}
        return [
            Weight(parameter=parameter, source=self.tensor(parameter, dims), over=layers, dtype=dtype)
            for parameter, dims in shapes.items()
        ]


def weight_descriptors(config: Any) -> WeightDescriptors:
    released, saved, runtime = (Namer(names) for names in (RELEASED, SAVED, RUNTIME))
    return WeightDescriptors(
        *common(config, released),
        *separate_experts(config, released),
        others=[
            Layout("saved by transformers", (*common(config, saved), *separate_experts(config, saved))),
            Layout("stacked experts", (*common(config, runtime), *stacked_experts(config, runtime))),
        ],
    )


def common(config: Any, namer: Namer) -> list[Descriptor]:
    """Everything but the routed experts."""
    return [
        *outer_weights(config, namer),
        *hyper_connection_weights(config, namer),
        *attention_weights(config, namer),
        *compressor_weights(config, namer),
        *router_weights(config, namer),
        *shared_expert_weights(config, namer),
        Skip(r"(.*\.)?mtp\..*", "multi-token prediction, which drafts tokens"),
    ]


def layers_of(config: Any, *types: str) -> list[int]:
    """Layers whose attention is of one of these kinds."""
    return [layer for layer, layer_type in enumerate(config.layer_types) if layer_type in types]


def outer_weights(config: Any, namer: Namer) -> list[Descriptor]:
    hidden, streams = config.hidden_size, config.hc_mult
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    table = (Axis("vocab", config.vocab_size), hidden)
    norms: Shapes = {LAYER + "input_layernorm.weight": (hidden,), LAYER + "post_attention_layernorm.weight": (hidden,)}
    last: Shapes = {
        "model.norm.weight": (hidden,),
        "model.hc_head.hc_fn": (streams, streams * hidden),
        "model.hc_head.hc_base": (streams,),
        "model.hc_head.hc_scale": (1,),
    }
    return [
        *namer.plain({embedding: table}),
        *([Tie(head, embedding)] if config.tie_word_embeddings else namer.plain({head: table})),
        *namer.plain(norms, range(config.num_hidden_layers), "float32"),
        *namer.plain(last, dtype="float32"),
    ]


def hyper_connection_weights(config: Any, namer: Namer) -> list[Descriptor]:
    streams = config.hc_mult
    size = (2 + streams) * streams
    shapes: Shapes = {"fn": (size, streams * config.hidden_size), "base": (size,), "scale": (3,)}
    return [
        descriptor
        for hc in ("attn_hc.", "ffn_hc.")
        for descriptor in namer.plain(
            {LAYER + hc + name: dims for name, dims in shapes.items()}, range(config.num_hidden_layers), "float32"
        )
    ]


def attention_weights(config: Any, namer: Namer) -> list[Descriptor]:
    hidden, rank, dim = config.hidden_size, config.q_lora_rank, config.head_dim
    heads = Axis("q heads", config.num_attention_heads, dim)
    groups = Axis("o groups", config.o_groups, config.o_lora_rank)
    matrices: Shapes = {
        "q_a_proj.weight": (rank, hidden),
        "q_b_proj.weight": (heads, rank),
        "kv_proj.weight": (dim, hidden),
        "o_a_proj.weight": (groups, heads.size // config.o_groups),
        "o_b_proj.weight": (hidden, groups),
    }
    pinned: Shapes = {
        "q_a_norm.weight": (rank,),
        "kv_norm.weight": (dim,),
        "sinks": (Axis("q heads", config.num_attention_heads),),
    }
    layers = range(config.num_hidden_layers)
    return [
        *namer.plain({ATTENTION + name: dims for name, dims in matrices.items()}, layers),
        *namer.plain({ATTENTION + name: dims for name, dims in pinned.items()}, layers, "float32"),
    ]


def compressor_weights(config: Any, namer: Namer) -> list[Descriptor]:
    """Of HCA one vector per token, of CSA and its indexer two."""
    hidden, rank = config.hidden_size, config.q_lora_rank
    compressor, indexer = ATTENTION + "compressor.", ATTENTION + "compressor.indexer."
    weights: list[Descriptor] = []
    for prefix, layer_type, dim, vectors in (
        (compressor, "heavily_compressed_attention", config.head_dim, 1),
        (compressor, "compressed_sparse_attention", config.head_dim, 2),
        (indexer, "compressed_sparse_attention", config.index_head_dim, 2),
    ):
        size, layers = vectors * dim, layers_of(config, layer_type)
        if not layers:  # the config need not have a rate for a kind that it does not use
            continue
        weights += namer.plain(
            {prefix + "kv_proj.weight": (size, hidden), prefix + "gate_proj.weight": (size, hidden)}, layers
        )
        bias = (config.compress_rates[layer_type], size)
        weights += namer.plain({prefix + "position_bias": bias, prefix + "kv_norm.weight": (dim,)}, layers, "float32")
    heads = Axis("index heads", config.index_n_heads, config.index_head_dim)
    scoring: Shapes = {
        indexer + "q_b_proj.weight": (heads, rank),
        indexer + "scorer.weights_proj.weight": (config.index_n_heads, hidden),
    }
    return weights + namer.plain(scoring, layers_of(config, "compressed_sparse_attention"))


def router_weights(config: Any, namer: Namer) -> list[Descriptor]:
    """The gates, and what they choose by: a table of token ids, or a bias."""
    kinds = list(enumerate(config.mlp_layer_types))
    hashed = [layer for layer, kind in kinds if kind == "hash_moe"]
    learned = [layer for layer, kind in kinds if kind != "hash_moe"]
    gate, experts = MOE + "gate.", config.n_routed_experts
    table = (config.vocab_size, config.num_experts_per_tok)
    return [
        *namer.plain({gate + "weight": (experts, config.hidden_size)}, range(config.num_hidden_layers)),
        *namer.plain({gate + "tid2eid": table}, hashed, "int64"),
        *namer.plain({gate + "e_score_correction_bias": (experts,)}, learned, "float32"),
    ]


def shared_expert_weights(config: Any, namer: Namer) -> list[Descriptor]:
    """A gated MLP, gate and up fused in this order."""
    hidden, intermediate = config.hidden_size, Axis("intermediate", config.moe_intermediate_size)
    prefix, layers = MOE + "shared_experts.", {"layer": range(config.num_hidden_layers)}
    kinds: Shapes = {"weight": (intermediate, hidden), **({"bias": (intermediate,)} if config.mlp_bias else {})}
    down: Shapes = {"weight": (hidden, intermediate), **({"bias": (hidden,)} if config.mlp_bias else {})}
    return [
        *(
            Weight(
                parameter=f"{prefix}gate_up_proj.{kind}",
                source=Concat(tuple(namer.tensor(f"{prefix}{name}.{kind}", dims) for name in ("gate_proj", "up_proj"))),
                over=layers,
            )
            for kind, dims in kinds.items()
        ),
        *namer.plain({f"{prefix}down_proj.{kind}": dims for kind, dims in down.items()}, layers["layer"]),
    ]


def separate_experts(config: Any, namer: Namer) -> list[Descriptor]:
    """One tensor per expert and projection: w1 is the gate, w3 up, w2 down."""
    hidden, experts = config.hidden_size, Axis("experts", config.n_routed_experts)
    intermediate = Axis("intermediate", config.moe_intermediate_size)
    prefix, layers = MOE + "experts.", {"layer": range(config.num_hidden_layers)}
    gate, up = (namer.tensor(f"{prefix}{{expert}}.{name}.weight", (intermediate, hidden)) for name in ("w1", "w3"))
    down = namer.tensor(prefix + "{expert}.w2.weight", (hidden, intermediate))
    return [
        Weight(parameter=prefix + "gate_up_proj", source=Stack(Concat((gate, up)), "expert", experts), over=layers),
        Weight(parameter=prefix + "down_proj", source=Stack(down, "expert", experts), over=layers),
    ]


def stacked_experts(config: Any, namer: Namer) -> list[Descriptor]:
    hidden, size = config.hidden_size, config.moe_intermediate_size
    experts, prefix = Axis("experts", config.n_routed_experts), MOE + "experts."
    shapes: Shapes = {
        prefix + "gate_up_proj": (experts, 2 * size, hidden),
        prefix + "down_proj": (experts, hidden, Axis("intermediate", size)),
    }
    return namer.plain(shapes, range(config.num_hidden_layers))
