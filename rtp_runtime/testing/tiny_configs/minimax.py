"""Tiny configs of the MiniMax models."""

from __future__ import annotations

from typing import Final

from rtp_runtime.testing.tiny_configs.common import VOCAB_SIZE, Tiny, rope, text

_MINIMAX_SCALE: Final = 3.5565588200778455
_MINIMAX_M3: Final = text(
    4,
    intermediate_size=32,
    dense_intermediate_size=96,
    shared_intermediate_size=32,
    head_dim=32,
    num_local_experts=8,
    num_experts_per_tok=2,
    routed_scaling_factor=2.0,
    rotary_dim=16,
    swiglu_alpha=1.702,
    swiglu_limit=1.0,
    mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
    index_n_heads=2,
    index_head_dim=32,
    index_block_size=4,
    index_topk_blocks=3,
    index_local_blocks=1,
    rope_parameters=rope(5e6, partial_rotary_factor=0.5),
)


def _minimax(*layer_types: str) -> Tiny:
    scales = {
        "full_attn_alpha_factor": _MINIMAX_SCALE,
        "full_attn_beta_factor": 1.0,
        "linear_attn_alpha_factor": _MINIMAX_SCALE,
        "linear_attn_beta_factor": 1.0,
        "mlp_alpha_factor": _MINIMAX_SCALE,
        "mlp_beta_factor": 1.0,
    }
    values = text(
        4,
        intermediate_size=48,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=8,
        layer_types=list(layer_types),
        rope_parameters=rope(1e7),
        **scales,
    )
    return Tiny("MiniMaxForCausalLM", "MiniMaxConfig", values)


MINIMAX: Final[dict[str, Tiny]] = {
    # As released, with a linear layer first: transformers' cached runs of it are wrong.
    "minimax": _minimax("linear_attention", "linear_attention", "linear_attention", "full_attention"),
    "minimax_full_first": _minimax("full_attention", "linear_attention", "full_attention", "linear_attention"),
    "minimax_m2": Tiny(
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        text(
            3,
            intermediate_size=32,
            head_dim=32,
            num_local_experts=8,
            num_experts_per_tok=2,
            rope_parameters=rope(5e6, partial_rotary_factor=0.5),
        ),
    ),
    "minimax_m3": Tiny(
        "MiniMaxM3VLForCausalLM",
        "MiniMaxM3VLTextConfig",
        _MINIMAX_M3,
        module="minimax_m3_vl.modeling_minimax_m3_vl",
    ),
    "minimax_m3_vl": Tiny(
        "MiniMaxM3SparseForConditionalGeneration",
        "MiniMaxM3VLConfig",
        _MINIMAX_M3,
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 4,
        },
        {"image_token_index": VOCAB_SIZE - 1, "video_token_index": VOCAB_SIZE - 2, "projector_hidden_size": 64},
        module="minimax_m3_vl.modeling_minimax_m3_vl",
    ),
}
