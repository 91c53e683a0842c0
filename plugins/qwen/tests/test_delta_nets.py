"""Delta nets in the engine: bit-equal where that is asked for, large states in place, prefixes reused, bfloat16."""

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
from rtp_runtime.testing.compare import check_tiny
from rtp_runtime.testing.tiny_models import write_tiny

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MODES: dict[str, dict[str, Any]] = {
    "chunks": {"max_chunk_tokens": 7},
    "one token at a time": {"max_chunk_tokens": 1},
    "mixed": {"max_num_batched_tokens": 11, "max_num_seqs": 3},
}


def draw(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 384, (length,), generator=generator).tolist() for length in lengths]


def run(llm: LLM, prompts: Sequence[list[int]]) -> list[Tensor]:
    """Logits of each prompt and its greedy continuation."""
    ids = [llm.engine.add(prompt, PARAMS, return_logits=True) for prompt in prompts]
    while llm.engine.has_work:
        llm.engine.step()
    return [logits for name in ids if (logits := llm.engine.output(name).logits) is not None]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen3_next", "float32"), ("qwen3_5", "bfloat16"), ("qwen4_exp", "float32"), ("qwen4_exp", "bfloat16")],
)
def test_deterministic_logits_are_bit_equal_in_every_mode(name: str, dtype: str, tmp_path: Path) -> None:
    write_tiny(name, tmp_path, linear_num_key_heads=1, linear_num_value_heads=3)
    loaded = load_model(tmp_path, dtype=dtype, deterministic=True, plugins=load_plugins())
    prompts = draw(5, 23, 1, 40)

    def engine(**limits: Any) -> LLM:
        return LLM.from_loaded(loaded, EngineConfig(num_blocks=64, deterministic=True, **limits))

    alone = [run(engine(), [prompt])[0] for prompt in prompts]
    for mode, limits in MODES.items():
        for ours, wanted in zip(run(engine(**limits), prompts), alone, strict=True):
            assert torch.equal(ours, wanted), mode


def test_large_states_are_updated_in_place(tmp_path: Path) -> None:
    sizes = {"linear_key_head_dim": 96, "linear_value_head_dim": 90, "num_hidden_layers": 2}
    overrides: dict[str, Any] = {**sizes, "layer_types": ["linear_attention", "full_attention"]}
    write_tiny("qwen3_5", tmp_path, **overrides)
    choices = load_model(tmp_path, dtype="float32", plugins=load_plugins()).ops.choices
    assert "cpu_in_place" in {choice.implementation for choice in choices if choice.op == "gated_delta_rule"}
    check_tiny("qwen3_5", **overrides)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe", "qwen4_exp"])
def test_a_reused_prefix_changes_nothing(name: str, tmp_path: Path) -> None:
    """Requests that begin alike start from a snapshot of both states and the blocks of the full layer."""
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


@pytest.mark.parametrize("name", ["qwen3_5", "qwen4_exp"])
def test_bfloat16_is_as_near_to_float32_as_the_reference(name: str, tmp_path: Path) -> None:
    model = write_tiny(name, tmp_path)
    (prompt,) = draw(50)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        exact = model(ids).logits[0]
        theirs = model.bfloat16()(ids).logits[0].float()
    loaded = load_model(tmp_path, dtype="bfloat16", plugins=load_plugins())
    with LLM.from_loaded(loaded, EngineConfig(num_blocks=64)) as llm:
        ours = llm.logits(prompt)
    assert (ours - exact).pow(2).mean() <= 1.5 * (theirs - exact).pow(2).mean()
