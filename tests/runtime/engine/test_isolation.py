"""Nothing of one request reaches another: with a predictable model results are bit-equal whatever the company."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rtp_runtime.engine import EngineConfig, RequestOutput, SamplingParams
from rtp_runtime.engine.engine import Engine

PROMPTS = [
    [random.Random(seed).randrange(32) for _ in range(length)]
    for seed, length in enumerate((1, 2, 7, 16, 23, 4, 9, 33))
]
GREEDY = SamplingParams(max_tokens=12)
SAMPLED = [SamplingParams(max_tokens=12, temperature=0.5 + 0.3 * place, seed=place, top_p=0.9) for place in range(8)]

COMPANY = {
    "together": {},
    "two at a time": {"max_num_seqs": 2},
    "chunks of 3": {"max_chunk_tokens": 3},
    "one token at a time": {"max_chunk_tokens": 1},
    "small budget": {"max_num_batched_tokens": 9, "max_num_seqs": 8},
    "budget of decodes only": {"max_num_batched_tokens": 3, "max_num_seqs": 3},
    "few blocks, chunks": {"num_blocks": 16, "max_chunk_tokens": 5},
    "preempted often": {"preempt_every": 2},
    "preempted, chunks": {"preempt_every": 3, "max_chunk_tokens": 4},
}


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("company", COMPANY, ids=str)
def test_greedy(run: Any, fake: Any, company: str, depth: int) -> None:
    outputs = run(PROMPTS, GREEDY, depth=depth, **COMPANY[company])
    assert [output.token_ids for output in outputs] == [fake.greedy(prompt, 12) for prompt in PROMPTS]
    assert {output.finish_reason for output in outputs} == {"length"}


@pytest.fixture
def alone(run: Any) -> list[list[int]]:
    return [run([prompt], params)[0].token_ids for prompt, params in zip(PROMPTS, SAMPLED, strict=True)]


@pytest.mark.parametrize("company", COMPANY, ids=str)
def test_sampled(run: Any, alone: list[list[int]], company: str) -> None:
    outputs = run(PROMPTS, SAMPLED, depth=1, **COMPANY[company])
    assert [output.token_ids for output in outputs] == alone


@pytest.mark.parametrize("company", ["together", "small budget", "preempted, chunks"])
def test_nan_logits_of_others(run: Any, fake: Any, alone: list[list[int]], company: str) -> None:
    """Requests whose every logit is NaN take part in each step; nobody else notices."""
    fake.nan_from = 31
    bad = [[31, 1, 2], [31] * 9]
    prompts = [[each % 31 for each in prompt] for prompt in PROMPTS]
    expected = [run([prompt], params)[0].token_ids for prompt, params in zip(prompts, SAMPLED, strict=True)]
    clean = [place for place, ids in enumerate(expected) if 31 not in ids]
    outputs = run([bad[0], *prompts, bad[1]], [GREEDY, *SAMPLED, SAMPLED[1]], **COMPANY[company])
    assert [outputs[place + 1].token_ids for place in clean] == [expected[place] for place in clean]
    assert len(clean) > 3


def test_order(run: Any, alone: list[list[int]]) -> None:
    outputs = run(PROMPTS[::-1], SAMPLED[::-1], num_blocks=20)
    assert [output.token_ids for output in outputs[::-1]] == alone


@pytest.mark.parametrize("company", COMPANY, ids=str)
def test_logits(run: Any, fake: Any, company: str) -> None:
    outputs = run(PROMPTS, SamplingParams(max_tokens=6), return_logits=True, **COMPANY[company])
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = prompt + output.token_ids
        expected = torch.stack([fake.expected(ids[:end]) for end in range(1, len(ids))])
        assert torch.equal(output.logits, expected)


def test_preemption_happened(run: Any, fake: Any) -> None:
    run(PROMPTS, GREEDY)
    undisturbed = sum(fake.num_tokens)
    fake.num_tokens.clear()
    run(PROMPTS, GREEDY, num_blocks=16)
    assert sum(fake.num_tokens) > undisturbed


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=7),
    cancels=st.dictionaries(st.integers(0, 6), st.integers(0, 20), max_size=2),
    blocks=st.integers(9, 20),
    chunk=st.none() | st.integers(1, 6),
    seqs=st.integers(1, 4),
    depth=st.integers(0, 2),
)
def test_arriving_and_leaving_at_any_time(
    loaded: Any,
    fake: Any,
    arrivals: list[tuple[int, int, int]],
    cancels: dict[int, int],
    blocks: int,
    chunk: int | None,
    seqs: int,
    depth: int,
) -> None:
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": 8 + seqs, "max_chunk_tokens": chunk, "depth": depth}
    engine = Engine(loaded, EngineConfig(num_blocks=blocks, block_size=4, **limits))
    prompts = [[(7 * place + each) % 32 for each in range(length)] for place, (_, length, _) in enumerate(arrivals)]
    outputs: dict[str, RequestOutput] = {}
    for now in range(1000):
        for place, (at, _, count) in enumerate(arrivals):
            if at == now:
                engine.add(prompts[place], SamplingParams(max_tokens=count), request_id=str(place))
            if cancels.get(place) == now and str(place) in engine:
                cancelled = engine.cancel(str(place))
                assert cancelled is not None
                outputs[str(place)] = cancelled
        for news in engine.step():
            if news.finish_reason is not None:
                outputs[news.request_id] = engine.output(news.request_id)
        if now > 20 and not engine.has_work:
            break
    for place, (_, _, count) in enumerate(arrivals):
        output = outputs[str(place)]
        expected = fake.greedy(prompts[place], count)
        assert output.token_ids == expected[: len(output.token_ids)]
        assert output.finish_reason == "abort" or output.token_ids == expected
    engine.clear_prefixes()
    assert engine._state.arena.num_free == engine._state.arena.plan.num_extents
