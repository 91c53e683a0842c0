"""Deterministic engines: the same logits, bit for bit, whatever the chunks in which a prompt is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rtp_runtime.testing.engines import assert_deterministic
from rtp_runtime.testing.tiny_models import write_tiny

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
    "glm5_next": ("glm5_next", {}),
    "glm5_next, no lower bound": ("glm5_next", {"linear_lower_bound": None, "linear_num_heads": 3}),
}
CHUNKS = {"chunks": {"max_chunk_tokens": 7}, "one token at a time": {"max_chunk_tokens": 1}}


@pytest.mark.parametrize("model", MODELS)
def test_chunks_change_nothing(tmp_path: Path, model: str) -> None:
    name, overrides = MODELS[model]
    write_tiny(name, tmp_path, **overrides)
    assert_deterministic(tmp_path, "float32", (61,), CHUNKS)
