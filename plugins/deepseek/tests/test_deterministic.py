"""DeepSeek's attention and what goes with it in a deterministic engine: logits are bit-equal whatever the company."""

from __future__ import annotations

from pathlib import Path

import pytest

from rtp_runtime.testing.engines import assert_deterministic
from rtp_runtime.testing.tiny_models import write_tiny

LENGTHS = (1, 5, 37, 70)
LIMITS: dict[str, dict[str, int]] = {
    "in company": {},
    "in chunks": {"max_chunk_tokens": 16},
    "two at a time": {"max_num_seqs": 2, "max_num_batched_tokens": 24},
}


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v32", "deepseek_v4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_bit_equal_whatever_the_company(tmp_path: Path, name: str, dtype: str) -> None:
    write_tiny(name, tmp_path)
    assert_deterministic(tmp_path, dtype, LENGTHS, LIMITS)
