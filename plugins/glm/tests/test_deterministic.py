"""Deterministic engines: the same logits, bit for bit, whatever the chunks in which a prompt is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rtp_runtime import LLM
from rtp_runtime.testing.tiny_models import VOCAB_SIZE, write_tiny

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
    "glm5_next": ("glm5_next", {}),
    "glm5_next, no lower bound": ("glm5_next", {"linear_lower_bound": None, "linear_num_heads": 3}),
}


def logits(directory: Path, chunk: int) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, VOCAB_SIZE, (61,), generator=draw).tolist()
    with LLM(directory, dtype="float32", num_blocks=64, deterministic=True, max_chunk_tokens=chunk) as llm:
        return llm.logits(prompt)


@pytest.mark.parametrize("model", MODELS)
def test_chunks_change_nothing(tmp_path: Path, model: str) -> None:
    name, overrides = MODELS[model]
    write_tiny(name, tmp_path, **overrides)
    whole = logits(tmp_path, 64)
    for chunk in (7, 1):
        assert torch.equal(logits(tmp_path, chunk), whole)
