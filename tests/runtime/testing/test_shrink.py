"""A shrunken config keeps what switches the computation and cuts what sizes it."""

from __future__ import annotations

import pytest
from transformers import Gemma2Config, LlamaConfig, Phi3Config, Qwen2Config, SmolLM3Config

from rtp_runtime.errors import ConfigError
from rtp_runtime.testing import shrink_config, tiny_checkpoint


def test_widths_shrink_and_switches_stay() -> None:
    config = Gemma2Config()
    small = shrink_config(config)
    assert small.hidden_size < 200 and small.vocab_size < 300 and small.intermediate_size < 200
    kept = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "hidden_activation")
    assert all(getattr(small, key) == getattr(config, key) for key in kept)


@pytest.mark.parametrize(
    "config", [LlamaConfig(), LlamaConfig(num_key_value_heads=8), LlamaConfig(num_key_value_heads=1)]
)
def test_grouped_heads_stay_grouped(config: LlamaConfig) -> None:
    small = shrink_config(config)
    assert (small.num_key_value_heads == small.num_attention_heads) == (
        config.num_key_value_heads == config.num_attention_heads
    )
    assert (small.num_key_value_heads == 1) == (config.num_key_value_heads == 1)


def test_heads_that_do_not_add_up_to_the_width_stay_so() -> None:
    small = shrink_config(LlamaConfig(head_dim=64))
    assert small.num_attention_heads * small.head_dim != small.hidden_size


def test_the_shortest_run_with_every_kind_of_layer_is_kept() -> None:
    assert shrink_config(SmolLM3Config()).no_rope_layers == [1, 1, 1, 0]
    windows = Qwen2Config(use_sliding_window=True, sliding_window=4096, max_window_layers=3, num_hidden_layers=8)
    small = shrink_config(windows)
    assert small.layer_types == ["full_attention"] * 3 + ["sliding_attention"] and small.sliding_window == 8
    assert shrink_config(LlamaConfig(), layers=5).num_hidden_layers == 5


def test_rotary_shares_stay_even() -> None:
    config = Phi3Config(partial_rotary_factor=0.4, hidden_size=320, num_attention_heads=4)
    small = shrink_config(config)
    dim = small.hidden_size // small.num_attention_heads
    assert int(dim * small.rope_parameters["partial_rotary_factor"]) % 2 == 0


def test_token_ids_stay_in_the_vocabulary() -> None:
    small = shrink_config(LlamaConfig(vocab_size=128256, eos_token_id=[128001, 128008], bos_token_id=128000))
    assert all(0 <= token < small.vocab_size for token in [small.bos_token_id, *small.eos_token_id])


def test_an_unknown_architecture_is_told(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="NoSuchForCausalLM"):
        tiny_checkpoint({"architectures": ["NoSuchForCausalLM"], "model_type": "llama"}, "nowhere")
