"""Tiny configs of the GLM models."""

from __future__ import annotations

from typing import Final

from rtp_runtime.testing.tiny_configs.common import ROUTED, VIT, VOCAB_SIZE, Tiny, mla, rope, text

GLM: Final[dict[str, Tiny]] = {
    "glm": Tiny(
        "GlmForCausalLM",
        "GlmConfig",
        text(
            3, intermediate_size=96, head_dim=16, attention_bias=True, rope_parameters=rope(partial_rotary_factor=0.5)
        ),
    ),
    # Norms on both sides of each block.
    "glm4": Tiny(
        "Glm4ForCausalLM",
        "Glm4Config",
        text(
            3, intermediate_size=96, head_dim=16, attention_bias=True, rope_parameters=rope(partial_rotary_factor=0.5)
        ),
    ),
    "glm4_moe": Tiny(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        text(
            3,
            intermediate_size=96,
            head_dim=32,
            attention_bias=True,
            use_qk_norm=True,
            n_shared_experts=1,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
            num_nextn_predict_layers=0,
            rope_parameters=rope(1e6, partial_rotary_factor=0.5),
            **ROUTED,
        ),
    ),
    # Latent attention.
    "glm4_moe_lite": Tiny(
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteConfig",
        mla(3, intermediate_size=96, routed_scaling_factor=1.8, rope_parameters=rope(1e6), **ROUTED),
    ),
    # Latent attention; layers that select keys, and layers that share the selection.
    "glm_moe_dsa": Tiny(
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaConfig",
        mla(
            4,
            intermediate_size=96,
            first_k_dense_replace=1,
            index_topk=8,
            index_head_dim=16,
            index_n_heads=16,
            indexer_types=["full", "shared", "full", "shared"],
            rope_parameters=rope(1e6),
            **ROUTED,
        ),
    ),
    # Delta attention with a decay per channel, latent attention without positions, hyper-connections, a vision part.
    "glm5_next": Tiny(
        "Glm5NextForConditionalGeneration",
        "Glm5NextConfig",
        mla(
            5,
            intermediate_size=96,
            qk_rope_head_dim=0,
            index_topk=8,
            index_head_dim=16,
            index_n_heads=16,
            index_kpool=4,
            layer_types=["linear_attention"] * 3 + ["indexed_attention"] * 2,
            indexer_types=["full", "full", "full", "full", "shared"],
            mlp_layer_types=["dense"] + ["sparse"] * 4,
            swiglu_limit=1.0,
            linear_head_dim=16,
            linear_num_heads=4,
            linear_conv_kernel_dim=4,
            linear_lower_bound=-5.0,
            hc_mult=4,
            **ROUTED,
        ),
        VIT | {"image_size": 32, "out_hidden_size": 64, "projection_intermediate_size": 48},
        {"image_token_id": VOCAB_SIZE - 1, "video_token_id": VOCAB_SIZE - 2},
    ),
}
