"""MiniMax-M3's checkpoints: as released, inside a vision-language model, and as transformers holds and saves them."""

from __future__ import annotations

from typing import Any

from rtp_runtime.weights import Axis, Concat, Descriptor, FromCheckpoint, Layout, Skip, Weight, renamed

from .weights import (
    IN_MEMORY,
    LAYER,
    MULTI_TOKEN,
    ON_HUB,
    Layers,
    attention_weights,
    extra_layers,
    fused_expert_weights,
    hub_expert_weights,
    outer_weights,
    router_bias,
    tensor,
)

ATTENTION = LAYER + "self_attn."
LEFT_OUT = (
    Skip(r"(?:.*\.)?vision_tower\..*", "the vision tower: only text is computed"),
    Skip(r"(?:.*\.)?(?:multi_modal_projector|patch_merge_mlp)\..*", "projection of images: only text is computed"),
    Skip(r"(?:.*\.)?mtp\..*", MULTI_TOKEN),
)


def hub(config: Any) -> tuple[Descriptor, ...]:
    """Released names: everything under `language_model.`, gate and up apart, experts one by one."""
    dense, routed = mlp_layers(config)
    shared = ON_HUB + "shared_experts."
    text = [
        *common(config),
        *indexer_weights(config, ATTENTION + "index_"),
        *hub_expert_weights(config, routed),
        router_bias(config, ON_HUB + "e_score_correction_bias", routed),
        *split_mlp(config, LAYER + "mlp.", LAYER + "mlp.", config.dense_intermediate_size, dense),
        *split_mlp(config, IN_MEMORY + "shared_experts.", shared, config.shared_intermediate_size, routed),
    ]
    prefix = "language_model."
    names = {"model.": prefix + "model.", "lm_head.": prefix + "lm_head."}
    return (*renamed(text, names), extra_layers(config, prefix + "model."), *LEFT_OUT)


def in_memory(name: str, config: Any, prefix: str) -> Layout:
    """The names of transformers' modules, which its class for text alone saves too; gate and up are one tensor."""
    dense, routed = mlp_layers(config)
    text = [
        *common(config),
        *indexer_weights(config, ATTENTION + "indexer."),
        *fused_expert_weights(config, routed),
        router_bias(config, IN_MEMORY + "gate.e_score_correction_bias", routed),
        *fused_mlp(config, LAYER + "mlp.", config.dense_intermediate_size, dense),
        *fused_mlp(config, IN_MEMORY + "shared_experts.", config.shared_intermediate_size, routed),
    ]
    return Layout(name, (*renamed(text, {"model.": prefix}), extra_layers(config, prefix), *LEFT_OUT))


def mlp_layers(config: Any) -> tuple[Layers, Layers]:
    """Layers with a dense MLP, and those with experts."""
    layers = range(config.num_hidden_layers)
    routed = [layer for layer in layers if config.mlp_layer_types[layer] == "sparse"]
    return {"layer": [layer for layer in layers if layer not in routed]}, {"layer": routed}


def common(config: Any) -> list[Descriptor]:
    """What has the same names, within the language model, in every form."""
    layers = {"layer": range(config.num_hidden_layers)}
    return [
        *outer_weights(config),
        *attention_weights(config, config.head_dim, layers),
        tensor(ATTENTION + "q_norm.weight", config.head_dim, over=layers),
        tensor(ATTENTION + "k_norm.weight", config.head_dim, over=layers),
    ]


def indexer_weights(config: Any, prefix: str) -> list[Descriptor]:
    """Of the layers that have one; names in the checkpoint begin with `prefix`."""
    hidden, dim = config.hidden_size, config.index_head_dim
    kinds = config.layer_types
    sparse = {"layer": [layer for layer, kind in enumerate(kinds) if kind == "minimax_m3_sparse"]}
    shapes: dict[str, tuple[int | Axis, ...]] = {
        "q_proj": (Axis("index heads", config.index_n_heads, dim), hidden),
        "k_proj": (dim, hidden),
        "q_norm": (dim,),
        "k_norm": (dim,),
    }
    return [
        Weight(
            parameter=f"{ATTENTION}indexer.{name}.weight",
            source=FromCheckpoint(f"{prefix}{name}.weight", dims),
            over=sparse,
        )
        for name, dims in shapes.items()
    ]


def split_mlp(config: Any, parameter: str, name: str, size: int, layers: Layers) -> list[Descriptor]:
    """An MLP whose gate and up are two tensors; checkpoint names begin with `name`, parameters with `parameter`."""
    hidden, intermediate = config.hidden_size, Axis("intermediate", size)
    gate, up = (FromCheckpoint(f"{name}{part}.weight", (intermediate, hidden)) for part in ("gate_proj", "up_proj"))
    down = FromCheckpoint(name + "down_proj.weight", (hidden, intermediate))
    return [
        Weight(parameter=parameter + "gate_up_proj.weight", source=Concat((gate, up)), over=layers),
        Weight(parameter=parameter + "down_proj.weight", source=down, over=layers),
    ]


def fused_mlp(config: Any, name: str, size: int, layers: Layers) -> list[Descriptor]:
    """An MLP whose gate and up are one tensor, in this order."""
    hidden, intermediate = config.hidden_size, Axis("intermediate", size)
    return [
        tensor(name + "gate_up_proj.weight", 2 * intermediate.size, hidden, over=layers),
        tensor(name + "down_proj.weight", hidden, intermediate, over=layers),
    ]
