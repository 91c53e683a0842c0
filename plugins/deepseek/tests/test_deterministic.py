"""DeepSeek's attention and what goes with it in a deterministic engine: logits are bit-equal whatever the company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rtp_runtime import LLM, EngineConfig
from rtp_runtime.model import load_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.tiny_models import write_tiny

LENGTHS = (1, 5, 37, 70)
LIMITS: dict[str, dict[str, int]] = {
    "in company": {},
    "in chunks": {"max_chunk_tokens": 16},
    "two at a time": {"max_num_seqs": 2, "max_num_batched_tokens": 24},
}


def prompt(length: int) -> list[int]:
    return torch.randint(3, 384, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def run(llm: LLM, lengths: tuple[int, ...]) -> list[Tensor]:
    """Logits of each prompt, which are computed together."""
    found = [llm.engine.add(prompt(length), None, return_logits=True) for length in lengths]
    while llm.engine.has_work:
        llm.engine.step()
    logits = [llm.engine.output(name).logits for name in found]
    assert all(part is not None for part in logits)
    return [part for part in logits if part is not None]


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v32", "deepseek_v4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_bit_equal_whatever_the_company(tmp_path: Path, name: str, dtype: str) -> None:
    write_tiny(name, tmp_path)
    loaded = load_model(tmp_path, dtype=dtype, deterministic=True, plugins=load_plugins())

    def engine(**limits: Any) -> LLM:
        return LLM.from_loaded(loaded, EngineConfig(**({"num_blocks": 64, "deterministic": True} | limits)))

    alone = [run(engine(), (length,))[0] for length in LENGTHS]
    for way, limits in LIMITS.items():
        for ours, expected in zip(run(engine(**limits), LENGTHS), alone, strict=True):
            assert torch.equal(ours, expected), way
