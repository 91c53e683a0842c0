"""What the engine allows, read from configs of language models and of wrappers around them."""

from __future__ import annotations

from typing import Any

import pytest

from rtp_runtime.engine.limits import model_limits
from rtp_runtime.model import ModelConfig

TEXT = {"vocab_size": 50, "max_position_embeddings": 300, "eos_token_id": 7}
WRAPPER = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
OLD = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}


@pytest.mark.parametrize(
    ("raw", "eos"),
    [
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"} | TEXT, {7}),
        (WRAPPER | {"text_config": TEXT}, {7}),
        (WRAPPER | {"text_config": TEXT, "vocab_size": 9, "eos_token_id": [8, 1000]}, {7, 8}),
        (OLD | TEXT, {7}),
    ],
)
def test_limits_are_those_of_the_language_model(raw: dict[str, Any], eos: set[int]) -> None:
    limits = model_limits(ModelConfig(raw), None)
    assert (limits.vocab_size, limits.context, set(limits.eos_ids)) == (50, 300, eos)
