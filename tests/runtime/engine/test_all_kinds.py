"""The engine over a model with a layer of every kind of state: tokens and logits equal the oracle's, exactly."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy import oracle
from toy.model import ToyForCausalLM, state_descriptors
from toy.numbers import VOCAB, ToyConfig

from rtp_runtime.engine import EngineConfig, RequestOutput, SamplingParams
from rtp_runtime.engine.engine import Engine

CONFIG = ToyConfig((4, 32))
COUNT = 9
"""Tokens that each request generates."""


def drawn(seed: int, count: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCAB) for _ in range(count)]


PROMPTS = tuple(tuple(drawn(seed, count)) for seed, count in enumerate([33, 5, 18, 1, 40]))


@functools.cache
def continuation(prompt: tuple[int, ...]) -> list[int]:
    return oracle.generate(prompt, COUNT, CONFIG)


@pytest.fixture
def loaded(tmp_path: Path) -> Any:
    """What load_model would return of the toy model."""
    return SimpleNamespace(
        module=ToyForCausalLM(CONFIG),
        config=SimpleNamespace(raw={"vocab_size": VOCAB, "max_position_embeddings": 64, "eos_token_id": None}, hf=None),
        states=state_descriptors(CONFIG),
        dtype=torch.float32,
        device="cpu",
        path=tmp_path,
        ops=SimpleNamespace(deterministic=False),
    )


def run(
    loaded: Any, prompts: Sequence[Sequence[int]], *, logits: bool = False, preempt_every: int = 0, **limits: Any
) -> tuple[Engine, list[RequestOutput]]:
    """Prompts to their end; what nobody owns is poisoned whenever no step is in flight."""
    engine = Engine(loaded, EngineConfig(**({"num_blocks": 24, "max_num_seqs": 8} | limits)))
    params = SamplingParams(max_tokens=COUNT)
    ids = [engine.add(prompt, params, return_logits=logits) for prompt in prompts]
    outputs: dict[str, RequestOutput] = {}
    steps = 0
    while engine.has_work:
        if not engine._tickets:
            engine._state.poison()
        steps += 1
        if preempt_every and steps % preempt_every == 0:
            engine.preempt(ids[steps // preempt_every % len(ids)])
        for news in engine.step():
            if news.finish_reason is not None:
                outputs[news.request_id] = engine.output(news.request_id)
    assert engine._state.arena.num_free == engine._state.arena.plan.num_extents, "all state has come back"
    return engine, [outputs[each] for each in ids]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("chunk", [None, 7])
def test_tokens_and_logits_in_mixed_steps(loaded: Any, depth: int, chunk: int | None) -> None:
    _, outputs = run(loaded, PROMPTS, logits=True, depth=depth, max_num_batched_tokens=24, max_chunk_tokens=chunk)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == continuation(prompt)
        assert output.logits is not None
        fed = [*prompt, *output.token_ids][: len(output.logits)]
        assert len(fed) >= len(prompt) + COUNT - 1
        assert output.logits.tolist() == oracle.logits(fed, CONFIG)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_small_pool_preempts_and_changes_nothing(loaded: Any, depth: int) -> None:
    # Each fits into one block, and grows into a second.
    prompts = [tuple(drawn(seed, 14)) for seed in range(10, 16)]
    engine, outputs = run(loaded, prompts, depth=depth, num_blocks=6, max_num_seqs=6)
    assert engine.num_preemptions > 0
    assert [output.token_ids for output in outputs] == [continuation(prompt) for prompt in prompts]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_preemption_at_any_moment_changes_nothing(loaded: Any, depth: int) -> None:
    engine, outputs = run(loaded, PROMPTS, depth=depth, preempt_every=2, max_chunk_tokens=11)
    assert engine.num_preemptions > 3
    assert [output.token_ids for output in outputs] == [continuation(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("depth", [0, 2])
def test_company_changes_no_logit(loaded: Any, depth: int) -> None:
    _, (alone,) = run(loaded, PROMPTS[2:3], logits=True)
    _, together = run(loaded, PROMPTS, logits=True, depth=depth, max_num_batched_tokens=9, max_num_seqs=4)
    assert alone.logits is not None and together[2].logits is not None
    both = min(len(alone.logits), len(together[2].logits))
    assert torch.equal(alone.logits[:both], together[2].logits[:both])
