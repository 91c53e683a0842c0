"""Tiny configs of the Qwen models."""

from __future__ import annotations

from typing import Final

from rtp_runtime.testing.tiny_configs.common import COMMON, DELTA, EXPERTS, MEDIA, MROPE, VIT, Tiny, rope, text

_QWEN3_5: Final = text(4, intermediate_size=96, head_dim=32, rope_parameters=rope(1e7, **MROPE), **DELTA)

QWEN: Final[dict[str, Tiny]] = {
    # Full and sliding layers, q/k/v biases, tied head.
    "qwen2": Tiny(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        text(
            4,
            intermediate_size=96,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=2,
            tie_word_embeddings=True,
            rope_parameters=rope(1e6),
        ),
    ),
    # Routed layers around a dense one, a shared expert behind a sigmoid gate, weights not renormalised.
    "qwen2_moe": Tiny(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        text(
            3,
            intermediate_size=96,
            shared_expert_intermediate_size=48,
            norm_topk_prob=False,
            mlp_only_layers=[1],
            rope_parameters=rope(1e6),
            **EXPERTS,
        ),
    ),
    # Norms on q and k, a head dim that is not hidden / heads, tied head.
    "qwen3": Tiny(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        text(3, intermediate_size=96, head_dim=32, tie_word_embeddings=True, rope_parameters=rope(1e6)),
    ),
    # Routed layers around a dense one, weights renormalised.
    "qwen3_moe": Tiny(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        text(
            3,
            intermediate_size=96,
            head_dim=32,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            rope_parameters=rope(1e6),
            **EXPERTS,
        ),
    ),
    # Three gated delta nets and one gated full attention.
    "qwen3_next": Tiny(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        text(
            4,
            intermediate_size=96,
            head_dim=32,
            shared_expert_intermediate_size=32,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            rope_parameters=rope(1e6, partial_rotary_factor=0.25),
            **EXPERTS,
            **DELTA,
        ),
    ),
    "qwen3_5": Tiny("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _QWEN3_5),
    "qwen3_5_moe": Tiny(
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        text(
            4,
            head_dim=32,
            shared_expert_intermediate_size=32,
            rope_parameters=rope(1e7, **MROPE),
            **EXPERTS,
            **DELTA,
        ),
    ),
    # The vision-language wrapper: model.language_model.*, model.visual.*.
    "qwen3_5_vl": Tiny(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        _QWEN3_5,
        VIT | {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 64},
        MEDIA,
    ),
    "qwen2_5_vl": Tiny(
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        text(3, intermediate_size=96, rope_parameters=rope(1e6, mrope_section=[2, 3, 3])),
        VIT | {"window_size": 16, "out_hidden_size": 64, "fullatt_block_indexes": [1]},
        MEDIA,
    ),
    "qwen3_vl": Tiny(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {key: value for key, value in COMMON.items() if key not in ("bos_token_id", "eos_token_id")}
        | {
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "head_dim": 32,
            "rope_parameters": rope(5e6, mrope_section=[8, 4, 4], mrope_interleaved=True),
        },
        VIT | {"depth": 3, "out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        MEDIA,
    ),
    # Delta nets with n-gram embeddings, block-selected attention, gated hyper-connections.
    "qwen4_exp": Tiny(
        "Qwen4ExpForCausalLM",
        "Qwen4ExpTextConfig",
        text(
            4,
            head_dim=32,
            shared_expert_intermediate_size=32,
            hc_count=2,
            hc_lowrank=16,
            ple_layer_ids=[2],
            ple_embed_dim=32,
            ple_conv_kernel_size=4,
            ngram_size=3,
            heads_per_ngram=2,
            ngram_vocab_size_base=101,
            make_ngram_vocab_size_divisible_by=8,
            split_ngram_parts=4,
            indexer_n_heads=12,
            indexer_kv_heads=1,
            indexer_head_dim=16,
            indexer_budget=8,
            indexer_compress_ratio=4,
            rope_parameters=rope(1e7, **MROPE),
            **EXPERTS,
            **DELTA,
        ),
    ),
}
