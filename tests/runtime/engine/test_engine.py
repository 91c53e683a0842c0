"""Admission, endings, log probabilities, cancelling and failure, on the predictable model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rtp_runtime.engine import EngineConfig, SamplingParams
from rtp_runtime.engine.engine import Engine
from rtp_runtime.errors import RequestError, StateError, UsageError

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def engine(loaded: Any) -> Engine:
    return Engine(loaded, EngineConfig(num_blocks=64, block_size=4))


def test_length(run: Any, fake: Any) -> None:
    output = run([PROMPT], SamplingParams(max_tokens=7))[0]
    assert (output.token_ids, output.finish_reason, output.text) == (fake.greedy(PROMPT, 7), "length", None)
    assert output.prompt_token_ids == PROMPT


def test_fills_the_context(run: Any, fake: Any) -> None:
    output = run([PROMPT], SamplingParams(max_tokens=None))[0]
    assert output.token_ids == fake.greedy(PROMPT, 59)
    assert len(PROMPT) + len(output.token_ids) == 64
    assert run([PROMPT], SamplingParams(max_tokens=500))[0].token_ids == output.token_ids


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_stop_ids(run: Any, loaded: Any, fake: Any, depth: int) -> None:
    tokens = fake.greedy(PROMPT, 20)
    stop = tokens[4]
    first = tokens.index(stop) + 1
    output = run([PROMPT], SamplingParams(max_tokens=20, stop_token_ids=[stop]), depth=depth)[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (tokens[:first], "stop", stop)
    loaded.config.raw["eos_token_id"] = [stop, 31]
    output = run([PROMPT], SamplingParams(max_tokens=20), depth=depth)[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (tokens[:first], "stop", None)
    output = run([PROMPT], SamplingParams(max_tokens=20, ignore_eos=True), depth=depth)[0]
    assert (output.token_ids, output.finish_reason) == (tokens, "length")
    output = run([PROMPT], SamplingParams(max_tokens=20, min_tokens=6), depth=depth)[0]
    assert stop not in output.token_ids[:6]


def test_logprobs(run: Any, fake: Any) -> None:
    outputs = run([PROMPT, PROMPT], [SamplingParams(max_tokens=4, logprobs=2), SamplingParams(max_tokens=4)])
    assert outputs[1].logprobs is None
    known = list(PROMPT)
    for token, entry in zip(outputs[0].token_ids, outputs[0].logprobs, strict=True):
        logs = fake.expected(known).log_softmax(-1)
        assert list(entry) == logs.topk(2).indices.tolist()
        assert entry[token].rank == 1
        assert entry[token].logprob == pytest.approx(float(logs[token]))
        known.append(token)


@pytest.mark.parametrize("limits", [{}, {"max_chunk_tokens": 2}, {"preempt_every": 4, "max_chunk_tokens": 2}], ids=str)
def test_prompt_logprobs(run: Any, fake: Any, limits: dict[str, int]) -> None:
    output = run([PROMPT], SamplingParams(max_tokens=3, prompt_logprobs=1), **limits)[0]
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(PROMPT)
    for place in range(1, len(PROMPT)):
        logs = fake.expected(PROMPT[:place]).log_softmax(-1)
        entry = output.prompt_logprobs[place][PROMPT[place]]
        assert entry.logprob == pytest.approx(float(logs[PROMPT[place]]))
        assert entry.rank == int((logs > logs[PROMPT[place]]).sum()) + 1
        assert int(logs.argmax()) in output.prompt_logprobs[place]


def test_the_head_sees_only_rows_that_are_needed(run: Any, fake: Any) -> None:
    run([PROMPT * 4], SamplingParams(max_tokens=3), max_chunk_tokens=8)
    assert fake.num_tokens == [8, 8, 4, 1, 1]
    assert fake.num_rows == [1, 1, 1]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([1, 32], "token id 32 at position 1 is outside the vocabulary: ids go from 0 to 31"),
        ([-1], "token id -1"),
        ([2**70], "beyond 64 bits"),
        ([1.5], "1.5, a float"),
        ([True], "True, a bool"),
        (["a"], "'a', a str"),
        ("text", "give a list of token ids"),
        (7, "7 is a int"),
        (None, "None is a NoneType"),
        ([1] * 64, r"64 tokens, but the longest request is 64 tokens, one of them new: shorten it to 63"),
        ([1] * 1000, "1000 tokens"),
    ],
)
def test_prompts_refused(engine: Engine, prompt: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        engine.add(prompt)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(stop="x"), "needs a tokenizer"),
        (SamplingParams(stop_token_ids=[32]), "stop_token_ids has 32"),
        (SamplingParams(logprobs=33), "logprobs=33"),
    ],
)
def test_params_refused(engine: Engine, params: SamplingParams, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        engine.add(PROMPT, params)


def test_limits_refused(loaded: Any) -> None:
    with pytest.raises(UsageError, match="max_model_len=65 is beyond the model's context of 64"):
        Engine(loaded, EngineConfig(max_model_len=65, num_blocks=64))
    with pytest.raises(UsageError, match="max_model_len=60 tokens do not fit"):
        Engine(loaded, EngineConfig(max_model_len=60, num_blocks=2, block_size=4))
    with pytest.raises(UsageError, match="give one of them"):
        Engine(loaded, EngineConfig(num_blocks=2, memory=10**6))
    with pytest.raises(UsageError, match="deterministic"):
        Engine(loaded, EngineConfig(deterministic=True))
    with pytest.raises(StateError):
        Engine(loaded, EngineConfig(memory=1))


def test_small_state_shortens_requests(loaded: Any) -> None:
    engine = Engine(loaded, EngineConfig(num_blocks=6, block_size=4))
    assert engine.max_model_len < 64
    with pytest.raises(RequestError, match="or raise max_model_len, num_blocks or memory"):
        engine.add([1] * engine.max_model_len)


def test_default_size_serves_all_at_full_length(loaded: Any) -> None:
    engine = Engine(loaded, EngineConfig(max_num_seqs=3))
    for _ in range(3):
        engine.add([1] * 63, SamplingParams(max_tokens=1))
    engine.step()
    assert not engine.has_work


@pytest.mark.parametrize("depth", [0, 2])
def test_cancel(loaded: Any, fake: Any, depth: int) -> None:
    engine = Engine(loaded, EngineConfig(num_blocks=64, block_size=4, max_num_seqs=2, depth=depth))
    ids = [engine.add(PROMPT, SamplingParams(max_tokens=9)) for _ in range(3)]
    for _ in range(4):
        engine.step()
    running = engine.cancel(ids[0])
    assert running is not None
    assert (running.finish_reason, running.token_ids) == ("abort", fake.greedy(PROMPT, 4 - depth))
    waiting = engine.cancel(ids[2])
    assert waiting is not None and waiting.token_ids == []
    assert engine.cancel(ids[0]) is None and engine.cancel("nobody") is None
    while engine.has_work:
        engine.step()
    assert engine.output(ids[1]).token_ids == fake.greedy(PROMPT, 9)
    assert not engine._state._requests and ids[1] not in engine


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failing_step_ends_all_and_leaves_a_clean_engine(loaded: Any, fake: Any, depth: int) -> None:
    engine = Engine(loaded, EngineConfig(num_blocks=64, block_size=4, depth=depth))
    ids = [engine.add(PROMPT), engine.add(PROMPT)]
    fake.fail_at = 3
    with pytest.raises(RuntimeError, match="the fake model fails"):
        while engine.has_work:
            engine.step()
    assert not engine.has_work and not engine._state._requests and ids[0] not in engine
    again = engine.add(PROMPT, SamplingParams(max_tokens=3))
    while engine.has_work:
        engine.step()
    assert engine.output(again).token_ids == fake.greedy(PROMPT, 3)


def test_seeds(run: Any) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=10)
    once, again = (run([PROMPT, PROMPT], params, seed=4) for _ in range(2))
    assert [each.token_ids for each in once] == [each.token_ids for each in again]
    assert once[0].token_ids != once[1].token_ids
    assert run([PROMPT], params)[0].token_ids != run([PROMPT], params)[0].token_ids
    fixed = SamplingParams(temperature=1.5, max_tokens=10, seed=9)
    assert run([PROMPT], fixed)[0].token_ids == run([PROMPT], fixed, seed=1)[0].token_ids


def test_same_id_twice(engine: Engine) -> None:
    engine.add(PROMPT, request_id="a")
    with pytest.raises(RequestError, match="'a'"):
        engine.add(PROMPT, request_id="a")


def test_logits_may_fill_the_context(engine: Engine, fake: Any) -> None:
    prompt = [1] * 64
    name = engine.add(prompt, SamplingParams(max_tokens=1), return_logits=True)
    while engine.has_work:
        engine.step()
    logits = engine.output(name).logits
    assert logits is not None and logits.shape == (64, 32)
    assert torch.equal(logits[-1], fake.expected(prompt))
