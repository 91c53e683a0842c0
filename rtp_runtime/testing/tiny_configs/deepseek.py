"""Tiny configs of the DeepSeek models."""

from __future__ import annotations

from typing import Final

from rtp_runtime.testing.tiny_configs.common import ROUTED, Tiny, mla, rope, text, yarn

DEEPSEEK: Final[dict[str, Tiny]] = {
    # As V2-Lite: no low-rank queries, greedy softmax routing; yarn.
    "deepseek_v2": Tiny(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        mla(
            3,
            intermediate_size=96,
            q_lora_rank=None,
            n_shared_experts=2,
            first_k_dense_replace=1,
            topk_method="greedy",
            routed_scaling_factor=1.0,
            rope_parameters=yarn(0.707),
            **ROUTED,
        ),
    ),
    # As V2: low-rank queries, experts limited to the best groups.
    "deepseek_v2_grouped": Tiny(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        mla(
            3,
            intermediate_size=96,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            topk_method="group_limited_greedy",
            routed_scaling_factor=16.0,
            rope_parameters=rope(),
            **ROUTED,
        ),
    ),
    # Grouped sigmoid routing with a bias; yarn with mscale.
    "deepseek_v3": Tiny(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        mla(
            3,
            intermediate_size=96,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            routed_scaling_factor=2.5,
            num_nextn_predict_layers=0,
            rope_parameters=yarn(1.0),
            **ROUTED,
        ),
    ),
    # V3 with the token indexer. With fewer index heads many scores would be exactly 0, and ties everywhere.
    "deepseek_v32": Tiny(
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        mla(
            3,
            intermediate_size=96,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            index_topk=8,
            index_head_dim=16,
            index_n_heads=16,
            rope_parameters=rope(),
            **ROUTED,
        ),
    ),
    # Sliding, sparsely and heavily compressed attention; hyper-connections; hashed and learned routing.
    "deepseek_v4": Tiny(
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        text(
            5,
            num_key_value_heads=1,
            head_dim=32,
            q_lora_rank=24,
            qk_rope_head_dim=8,
            n_shared_experts=1,
            routed_scaling_factor=1.5,
            layer_types=[
                "sliding_attention",
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe", "moe"],
            compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            sliding_window=8,
            hc_mult=4,
            hc_sinkhorn_iters=20,
            swiglu_limit=1.0,
            o_groups=2,
            o_lora_rank=16,
            index_n_heads=16,
            index_head_dim=16,
            index_topk=3,
            num_nextn_predict_layers=0,
            rope_theta=10000.0,
            compress_rope_theta=160000.0,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            **ROUTED,
        ),
    ),
}
