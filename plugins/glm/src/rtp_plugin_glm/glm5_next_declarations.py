"""What GLM-5.3-Flash says of its weights and states, and which configs it declines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rtp_runtime.model import text_config
from rtp_runtime.state import CompressedState, PagedState, SlotState, StateDescriptor, StateDescriptors
from rtp_runtime.weights import (
    Axis,
    Concat,
    Descriptor,
    FromCheckpoint,
    Layout,
    Skip,
    Source,
    Weight,
    WeightDescriptors,
    renamed,
)

from .glm import LAYER, all_layers, outer_weights
from .glm4_moe import moe_weight_descriptors
from .glm4_moe_lite import latent_attention_weights, latent_state, own_names, sparse_layers

LINEAR = "linear_attention"
ATTENTION = LAYER + "self_attn."
VISION = Skip(r"model\.visual\..*", "the vision part: only text is computed")
HUB_NAMES = {
    **{f"forget_gate.{name}": name for name in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log")},
    **{f"{kind}_hc.{name}": f"hc_{kind}_{name}" for kind in ("attn", "ffn") for name in ("fn", "base", "scale")},
}
"""Parameters, by the end of their name, that the hub's files call differently."""


def linear_size(config: Any) -> int:
    """Channels of the queries (keys, values) of linear attention."""
    size: int = config.linear_num_heads * config.linear_head_dim
    return size


def layers_of(config: Any, *, linear: bool) -> list[int]:
    return [layer for layer in range(config.num_hidden_layers) if (config.layer_types[layer] == LINEAR) == linear]


def skips_topk(config: Any, layer: int) -> bool:
    """Whether an attending layer has no indexer and takes the selection of the last layer that has one."""
    return bool(config.indexer_types[layer] == "shared")


def indexer_layers(config: Any) -> list[int]:
    return [layer for layer in layers_of(config, linear=False) if not skips_topk(config, layer)]


def reason_against(config: Any) -> str | None:
    """Why a text config asks for more than is computed, or None."""
    attending = layers_of(config, linear=False)
    if attending and skips_topk(config, attending[0]):
        return f"indexer_types: layer {attending[0]} shares a selection, and no layer before it makes one"
    if config.index_kpool > 1 and not config.index_kpool_always_select_tail:
        return (
            f"index_kpool_always_select_tail is false: the first {config.index_kpool - 1} tokens would attend to "
            "nothing, which the reference fills with an average over all tokens, those to come among them"
        )
    return None


def linear_attention_weights(config: Any, *, hub: bool) -> list[Descriptor]:
    """Kimi delta attention: fused q, k, v, and the rest under the hub's names or those of the parameters."""
    hidden, size, dim = config.hidden_size, linear_size(config), config.linear_head_dim
    heads = Axis("linear heads", config.linear_num_heads, dim)
    over = {"layer": layers_of(config, linear=True)}
    parts = [FromCheckpoint(f"{ATTENTION}{name}_proj.weight", (heads, hidden)) for name in "qkv"]
    taps = (1, config.linear_conv_kernel_dim)
    conv: Source = FromCheckpoint(ATTENTION + "conv1d.weight", (3 * size, *taps))
    if hub:
        conv = Concat(tuple(FromCheckpoint(f"{ATTENTION}{name}_conv1d.weight", (heads, *taps)) for name in "qkv"))
    plain = {
        "forget_gate.f_a_proj.weight": (dim, hidden),
        "forget_gate.f_b_proj.weight": (heads, dim),
        "b_proj.weight": (config.linear_num_heads, hidden),
        "g_a_proj.weight": (dim, hidden),
        "g_b_proj.weight": (heads, dim),
        "o_norm.weight": (dim,),
        "o_proj.weight": (hidden, heads),
    }
    wide = {"forget_gate.dt_bias": (size,), "forget_gate.A_log": (config.linear_num_heads,)}
    return [
        Weight(parameter=ATTENTION + "qkv_proj.weight", source=Concat(tuple(parts)), over=over),
        Weight(parameter=ATTENTION + "conv1d.weight", source=conv, over=over, dtype="float32"),
        *named(ATTENTION, plain, over, hub=hub),
        *named(ATTENTION, wide, over, hub=hub, dtype="float32"),
    ]


def named(
    prefix: str,
    shapes: Mapping[str, tuple[int | Axis, ...]],
    over: Mapping[str, Any],
    *,
    hub: bool,
    dtype: str = "model",
) -> list[Descriptor]:
    """Parameters that are tensors of the checkpoint, under the hub's names or their own."""
    names = HUB_NAMES if hub else {}
    return [
        Weight(
            parameter=prefix + name, source=FromCheckpoint(prefix + names.get(name, name), dims), over=over, dtype=dtype
        )
        for name, dims in shapes.items()
    ]


def hyper_connection_weights(config: Any, *, hub: bool) -> list[Descriptor]:
    count, layers = config.hc_mult, all_layers(config)
    size = (2 + count) * count
    plain = {f"{kind}_hc.fn": (size, count * config.hidden_size) for kind in ("attn", "ffn")}
    wide = {f"{kind}_hc.base": (size,) for kind in ("attn", "ffn")} | {
        f"{kind}_hc.scale": (3,) for kind in ("attn", "ffn")
    }
    return [*named(LAYER, plain, layers, hub=hub), *named(LAYER, wide, layers, hub=hub, dtype="float32")]


def pooled_indexer_weights(config: Any) -> list[Descriptor]:
    heads, dim, hidden = config.index_n_heads, config.index_head_dim, config.hidden_size
    shapes = {
        "wq_b.weight": (heads * dim, config.q_lora_rank),
        "wk.weight": (dim, hidden),
        "k_norm.weight": (dim,),
        "k_norm.bias": (dim,),
        "weights_proj.weight": (heads, hidden),
        "index_kpool_compress_ape": (config.index_kpool, dim),
        "index_kpool_compress_gate": (dim, hidden),
    }
    return own_names(ATTENTION + "indexer.", shapes, {"layer": indexer_layers(config)})


def text_layouts(config: Any, *, hub: bool) -> tuple[Layout, ...]:
    """Of the language model alone: with a tensor per expert, and with stacked ones."""
    common = [
        *outer_weights(config),
        *linear_attention_weights(config, hub=hub),
        *latent_attention_weights(config, {"layer": layers_of(config, linear=False)}),
        *pooled_indexer_weights(config),
        *hyper_connection_weights(config, hub=hub),
    ]
    return moe_weight_descriptors(config, common, sparse_layers(config)).layouts


def weight_descriptors(config: Any) -> WeightDescriptors:
    """The hub's form, the same with stacked experts, and what transformers holds in memory."""
    text = text_config(config)
    per_expert, stacked = text_layouts(text, hub=True)
    found = (per_expert, stacked, Layout("as in memory", text_layouts(text, hub=False)[1].descriptors))
    whole = [
        Layout(each.name, (*renamed(each.descriptors, {"model.": "model.language_model."}), VISION)) for each in found
    ]
    return WeightDescriptors(*whole[0].descriptors, others=whole[1:])


def state_descriptors(config: Any) -> StateDescriptors:
    """Convolution tail and delta state of linear layers; latents of the others, and keys where there is an indexer."""
    text = text_config(config)
    heads, dim, index = text.linear_num_heads, text.linear_head_dim, text.index_head_dim
    linear: dict[str, StateDescriptor] = {
        "conv": SlotState(axes={"channels": 3 * linear_size(text), "taps": text.linear_conv_kernel_dim - 1}),
        "state": SlotState(axes={"heads": heads, "key": dim, "value": dim}, dtype="float32"),
    }
    keys: dict[str, StateDescriptor] = {
        "index": PagedState(axes={"index": 2 * index}),
        "pools": CompressedState(axes={"index": index}, tokens_per_entry=text.index_kpool),
    }
    latent: dict[str, StateDescriptor] = {"latent": latent_state(text)}

    def of(layer: int) -> dict[str, StateDescriptor]:
        if text.layer_types[layer] == LINEAR:
            return linear
        return latent if skips_topk(text, layer) else latent | keys

    return StateDescriptors([of(layer) for layer in range(text.num_hidden_layers)])
