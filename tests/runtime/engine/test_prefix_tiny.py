"""Prefix reuse on real tiny checkpoints: the same prompt again, and prompts that part from it, against no reuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rtp_runtime import LLM, SamplingParams
from rtp_runtime.engine import EngineConfig, RequestOutput
from rtp_runtime.model import LoadedModel, load_model
from rtp_runtime.testing.tiny_models import VOCAB_SIZE, write_tiny

NAMES = ["qwen2", "qwen3_next", "deepseek_v32", "deepseek_v4", "minimax"]
"""Any name of `tiny_models` will do; these have windows, slots, indexer keys, compressed states and all of them."""
NEW = 8
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=VOCAB_SIZE)


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp(request.param)
    write_tiny(request.param, path)
    return load_model(path, dtype="float32")


def drawn(seed: int, count: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB_SIZE, (count,), generator=draw).tolist()


def logprobs(output: RequestOutput) -> torch.Tensor:
    """[new tokens, vocabulary]"""
    assert output.logprobs is not None
    return torch.tensor([[entry[token].logprob for token in range(VOCAB_SIZE)] for entry in output.logprobs])


def agree(output: RequestOutput, expected: RequestOutput) -> None:
    """Both of our runs may be off by what one may be off from the reference."""
    assert output.token_ids == expected.token_ids
    wanted = logprobs(expected)
    assert (logprobs(output) - wanted).abs().max() <= 2 * 2e-5 * wanted.std()


@pytest.mark.parametrize("limits", [{}, {"max_chunk_tokens": 33, "depth": 1}], ids=["whole", "chunks, a step ahead"])
def test_reuse_changes_nothing_beyond_rounding(loaded: LoadedModel, limits: dict[str, Any]) -> None:
    size: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 4} | limits
    fresh = LLM.from_loaded(loaded, EngineConfig(**size, prefix_caching=False))
    llm = LLM.from_loaded(loaded, EngineConfig(**size))
    unit = llm.engine._state.prefixes.unit  # type: ignore[union-attr]
    shared = drawn(1, 2 * unit + 5)
    prompts = [[*shared, *drawn(2 + k, 9)] for k in range(3)]
    for place, prompt in enumerate([prompts[0], *prompts]):
        (output,), (expected,) = llm.generate(prompt, PARAMS), fresh.generate(prompt, PARAMS)
        agree(output, expected)
        assert output.num_cached_tokens % unit == 0
        # Slots are copied where prompts part only when that is known: for the second that does.
        if place in (1, 3):
            assert output.num_cached_tokens >= 2 * unit
    before = llm.engine.stats
    assert before.prefix_hits >= 2 and before.cached_tokens >= 4 * unit
    turn = [*prompts[2], *expected.token_ids, *drawn(9, unit)]
    llm.engine._state.poison()
    together, alone = llm.generate([turn, *prompts], PARAMS), fresh.generate([turn, *prompts], PARAMS)
    for output, expected in zip(together, alone, strict=True):
        agree(output, expected)
        assert output.num_cached_tokens >= 2 * unit
    assert fresh.engine.stats.prefix_lookups == 0
    llm.engine.clear_prefixes()
    assert llm.engine._state.arena.num_free == llm.engine._state.arena.plan.num_extents


def test_logits_are_of_every_position(loaded: LoadedModel) -> None:
    llm = LLM.from_loaded(loaded, EngineConfig(num_blocks=64))
    prompt = drawn(5, 50)
    first = llm.logits(prompt)
    llm.generate(prompt, PARAMS)
    again = llm.logits(prompt)
    assert first.shape == again.shape == (50, VOCAB_SIZE)
    assert torch.equal(first, again)


def test_deterministic_reuse_is_bit_equal(loaded: LoadedModel) -> None:
    plain = load_model(loaded.path, dtype="float32", deterministic=True)
    size: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 4, "deterministic": True}
    fresh = LLM.from_loaded(plain, EngineConfig(**size, prefix_caching=False))
    llm = LLM.from_loaded(plain, EngineConfig(**size))
    prompts = [[*drawn(6, 150), *drawn(7 + k, 9)] for k in range(2)]
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=5)
    for place, prompt in enumerate([*prompts, prompts[0]]):
        (output,), (expected,) = llm.generate(prompt, params), fresh.generate(prompt, params)
        assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)
        assert (output.num_cached_tokens > 0) == (place > 0)
