"""MiniMax in the engine: bit-equal where that is asked for, prefixes reused, as exact in bfloat16 as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rtp_runtime import LLM, EngineConfig, SamplingParams
from rtp_runtime.model import load_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.tiny_models import write_tiny

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MODES: dict[str, dict[str, Any]] = {
    "chunks": {"max_chunk_tokens": 7},
    "one token at a time": {"max_chunk_tokens": 1},
    "mixed": {"max_num_batched_tokens": 11, "max_num_seqs": 3},
}


def draw(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 380, (length,), generator=generator).tolist() for length in lengths]


def run(llm: LLM, prompts: Sequence[list[int]]) -> list[Tensor]:
    """Logits of each prompt and its greedy continuation."""
    ids = [llm.engine.add(prompt, PARAMS, return_logits=True) for prompt in prompts]
    while llm.engine.has_work:
        llm.engine.step()
    return [logits for name in ids if (logits := llm.engine.output(name).logits) is not None]


@pytest.mark.parametrize(
    ("name", "dtype"), [("minimax", "float32"), ("minimax_m2", "bfloat16"), ("minimax_m3", "bfloat16")]
)
def test_deterministic_logits_are_bit_equal_in_every_mode(name: str, dtype: str, tmp_path: Path) -> None:
    write_tiny(name, tmp_path)
    loaded = load_model(tmp_path, dtype=dtype, deterministic=True, plugins=load_plugins())
    prompts = draw(5, 23, 1, 40)

    def engine(**limits: Any) -> LLM:
        return LLM.from_loaded(loaded, EngineConfig(num_blocks=64, deterministic=True, **limits))

    alone = [run(engine(), [prompt])[0] for prompt in prompts]
    for mode, limits in MODES.items():
        for ours, wanted in zip(run(engine(**limits), prompts), alone, strict=True):
            assert torch.equal(ours, wanted), mode


@pytest.mark.parametrize("name", ["minimax", "minimax_m3_vl"])
def test_a_reused_prefix_changes_nothing(name: str, tmp_path: Path) -> None:
    """Requests that begin alike start from a copy of the states, the blocks of keys and those of index keys."""
    write_tiny(name, tmp_path)
    loaded = load_model(tmp_path, dtype="float32", plugins=load_plugins())
    begin, *ends = draw(80, 9, 1, 30)
    prompts = [begin + end for end in ends]

    def tokens(caching: bool) -> tuple[list[list[int]], int]:
        with LLM.from_loaded(loaded, EngineConfig(num_blocks=64, prefix_caching=caching)) as llm:
            found = [list(llm.generate([prompt], PARAMS)[0].token_ids) for prompt in (begin, *prompts)]
            return found, llm.engine.stats.prefix_hits

    cached, hits = tokens(caching=True)
    assert (cached, 0) == tokens(caching=False) and hits > 0


@pytest.mark.parametrize("name", ["minimax", "minimax_m2", "minimax_m3"])
def test_bfloat16_is_as_near_to_float32_as_the_reference(name: str, tmp_path: Path) -> None:
    """On a prompt that all blocks of M3 are chosen for: rounding would choose others."""
    sizes = {"index_topk_blocks": 64} if name == "minimax_m3" else {}
    model = write_tiny(name, tmp_path, **sizes)
    model.set_experts_implementation("eager")
    (prompt,) = draw(50)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        exact = model(ids).logits[0]
        theirs = model.bfloat16()(ids).logits[0].float()
    loaded = load_model(tmp_path, dtype="bfloat16", plugins=load_plugins())
    with LLM.from_loaded(loaded, EngineConfig(num_blocks=64)) as llm:
        ours = llm.logits(prompt)
    assert (ours - exact).pow(2).mean() <= 1.5 * (theirs - exact).pow(2).mean()
