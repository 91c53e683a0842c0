"""The Python entry: forms of prompts, interleaved streams, closing, and what a dropped LLM leaves behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from rtp_runtime import LLM, SamplingParams
from rtp_runtime.engine import EngineConfig
from rtp_runtime.errors import RequestError, UsageError

PROMPT = [3, 1, 4, 1, 5]
FOUR = SamplingParams(max_tokens=4)


@pytest.fixture
def llm(loaded: Any) -> LLM:
    return LLM.from_loaded(loaded, EngineConfig(num_blocks=64, block_size=4))


def test_prompts(llm: LLM, fake: Any) -> None:
    assert [each.token_ids for each in llm.generate(PROMPT, FOUR)] == [fake.greedy(PROMPT, 4)]
    assert [each.token_ids for each in llm.generate([PROMPT, [7]], FOUR)] == [
        fake.greedy(PROMPT, 4),
        fake.greedy([7], 4),
    ]
    assert [len(each.token_ids) for each in llm.generate([PROMPT, [7]], [FOUR, SamplingParams(max_tokens=2)])] == [4, 2]
    assert len(llm.generate(PROMPT)[0].token_ids) == 16
    assert llm.generate(torch.tensor([PROMPT, PROMPT]), FOUR)[1].token_ids == fake.greedy(PROMPT, 4)
    assert llm.generate(tuple(PROMPT), FOUR)[0].prompt_token_ids == PROMPT


@pytest.mark.parametrize(
    "prompts", [[], "", [[]], [PROMPT, []], [PROMPT, 3], 5, None, {"a": 1}, [[1, "a"]], b"x", "text"]
)
def test_prompts_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompts, FOUR)
    assert not llm.engine.has_work and not llm.engine._requests


@pytest.mark.parametrize("params", [[FOUR], [FOUR, None], 5, {"max_tokens": 3}])
def test_params_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(UsageError):
        llm.generate([PROMPT, PROMPT], params)


def test_options_refused() -> None:
    with pytest.raises(UsageError, match="'max_tokens' is no option of LLM"):
        LLM("nowhere", max_tokens=3)


def test_chat_needs_a_tokenizer(llm: LLM) -> None:
    assert llm.tokenizer is None
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_logits(llm: LLM, fake: Any) -> None:
    logits = llm.logits(PROMPT)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, torch.stack([fake.expected(PROMPT[:end]) for end in range(1, 6)]))
    with pytest.raises(RequestError):
        llm.logits([])


def test_stream(llm: LLM, fake: Any) -> None:
    outputs = list(llm.stream(PROMPT, FOUR))
    tokens = fake.greedy(PROMPT, 4)
    assert [each.token_ids for each in outputs] == [tokens[:1], tokens[:2], tokens[:3], tokens]
    assert [each.new_token_ids for each in outputs] == [[token] for token in tokens]
    assert [each.finished for each in outputs] == [False, False, False, True]
    assert not llm.engine._requests


def test_interleaved(llm: LLM, fake: Any) -> None:
    """What others advance is not lost: a stream that is read late gets all of its tokens at once."""
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=6))
    assert next(stream).token_ids == fake.greedy(PROMPT, 1)
    other = llm.stream([9], FOUR)
    assert next(other).token_ids == fake.greedy([9], 1)
    assert llm.generate([7], SamplingParams(max_tokens=8))[0].token_ids == fake.greedy([7], 8)
    rest = list(stream)
    assert rest[-1].token_ids == fake.greedy(PROMPT, 6) and rest[-1].new_token_ids == fake.greedy(PROMPT, 6)[1:]
    other.close()
    assert not llm.engine.has_work and not llm.engine._requests


def test_closing_a_stream_cancels(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=50))
    next(stream)
    stream.close()
    assert not llm.engine.has_work and not llm.engine._state._requests
    llm.stream(PROMPT)
    gc.collect()
    assert not llm.engine.has_work


def test_a_stream_ends_with_the_step_that_fails(llm: LLM, fake: Any) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=50))
    next(stream)
    fake.fail_at = len(fake.num_tokens) + 1
    with pytest.raises(RuntimeError, match="the fake model fails"):
        llm.generate(PROMPT, FOUR)
    with pytest.raises(RequestError, match="was aborted"):
        next(stream)
    assert len(llm.generate(PROMPT, FOUR)[0].token_ids) == 4


def test_close(llm: LLM) -> None:
    stream = llm.stream(PROMPT, FOUR)
    next(stream)
    with llm:
        pass
    for use in (lambda: llm.generate(PROMPT), lambda: llm.model, lambda: next(stream)):
        with pytest.raises(UsageError, match="closed"):
            use()
    llm.close()


def test_a_dropped_llm_frees_its_state(loaded: Any, fake: Any) -> None:
    for _ in range(3):
        llm = LLM.from_loaded(loaded, EngineConfig(num_blocks=64, block_size=4, depth=2))
        llm.generate([PROMPT, PROMPT], FOUR)
        next(llm.stream(PROMPT, FOUR))
        arena = weakref.ref(llm.engine._state.arena.buffer)
        engine = weakref.ref(llm.engine)
        del llm
        gc.collect()
        assert arena() is None and engine() is None
