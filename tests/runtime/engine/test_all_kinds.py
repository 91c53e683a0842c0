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
from toy.finish import finish
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


GREEDY = SamplingParams(max_tokens=COUNT)


class Script:
    """Proposes what is scripted for a prompt's continuation, of which every `wrong`th token is false."""

    max_drafts = 3

    def __init__(self, scripts: dict[tuple[int, ...], list[int]], wrong: int) -> None:
        self.scripts = scripts
        self.wrong = wrong
        self.num_proposed = 0

    def propose(self, request_id: str, token_ids: Sequence[int], limit: int) -> list[int]:
        prompt = next(each for each in self.scripts if tuple(token_ids[: len(each)]) == each)
        done = len(token_ids) - len(prompt)
        script = self.scripts[prompt][done : done + limit]
        self.num_proposed += len(script)
        return [
            (token + 1) % VOCAB if (done + place) % self.wrong == self.wrong - 1 else token
            for place, token in enumerate(script)
        ]


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
        fingerprint="",
        state_policies={},
    )


def run(
    loaded: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams = GREEDY,
    *,
    logits: bool = False,
    preempt_every: int = 0,
    proposer: Script | None = None,
    **limits: Any,
) -> tuple[Engine, list[RequestOutput]]:
    """Prompts to their end; what nobody owns is poisoned whenever no step is in flight."""
    engine = Engine(loaded, EngineConfig(**({"num_blocks": 24, "max_num_seqs": 8} | limits)), proposer=proposer)
    ids = [engine.add(prompt, params, return_logits=logits) for prompt in prompts]
    outputs = finish(engine, ids, preempt_every)
    engine.clear_prefixes()
    assert engine._state.arena.num_free == engine._state.arena.plan.num_extents, "all state has come back"
    return engine, outputs


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


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("wrong", [1, 2, 3, 100])
def test_drafts_right_and_wrong_change_nothing_but_the_number_of_steps(loaded: Any, wrong: int, depth: int) -> None:
    """After a wrong draft every kind of state is rewound."""
    script = Script({prompt: continuation(prompt) for prompt in PROMPTS}, wrong)
    _, outputs = run(loaded, PROMPTS, logits=True, proposer=script, depth=depth, max_num_batched_tokens=32)
    assert script.num_proposed > len(PROMPTS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.token_ids == continuation(prompt)
        assert output.logits is not None
        assert output.logits.tolist() == oracle.logits([*prompt, *output.token_ids], CONFIG)[: len(output.logits)]


def test_right_drafts_save_steps(loaded: Any) -> None:
    def steps(wrong: int) -> int:
        script = Script({PROMPTS[0]: continuation(PROMPTS[0])}, wrong)
        engine = Engine(loaded, EngineConfig(num_blocks=24), proposer=script)
        engine.add(PROMPTS[0], GREEDY)
        count = 0
        while engine.has_work:
            engine.step()
            count += 1
        return count

    # One prefill step, then 8 tokens: singly, or 1 + 3 at a time.
    assert (steps(1), steps(100)) == (9, 3)


def test_drafts_with_preemption_and_little_memory(loaded: Any) -> None:
    prompts = [tuple(drawn(seed, 14)) for seed in range(10, 16)]
    script = Script({prompt: continuation(prompt) for prompt in prompts}, 3)
    engine, outputs = run(loaded, prompts, proposer=script, depth=1, preempt_every=4, num_blocks=6, max_num_seqs=6)
    assert engine.num_preemptions > 0
    assert [output.token_ids for output in outputs] == [continuation(prompt) for prompt in prompts]


def test_sampled_tokens_do_not_depend_on_drafts(loaded: Any) -> None:
    params = SamplingParams(max_tokens=COUNT, temperature=900.0, seed=7, logprobs=2)
    _, plain = run(loaded, PROMPTS, params)
    script = Script({prompt: output.token_ids for prompt, output in zip(PROMPTS, plain, strict=True)}, 2)
    _, guessed = run(loaded, PROMPTS, params, proposer=script)
    assert script.num_proposed > 0
    assert [output.token_ids for output in guessed] == [output.token_ids for output in plain]
    assert [output.logprobs for output in guessed] == [output.logprobs for output in plain]
    assert [output.token_ids for output in plain] != [continuation(prompt) for prompt in PROMPTS]


def test_a_stop_among_accepted_drafts_ends_the_request_there(loaded: Any) -> None:
    tokens = continuation(PROMPTS[0])
    place = next(place for place in (2, 3) if tokens[place] not in tokens[:place])
    params = SamplingParams(max_tokens=COUNT, stop_token_ids=[tokens[place]])
    _, (output,) = run(loaded, PROMPTS[:1], params, proposer=Script({PROMPTS[0]: tokens}, 100))
    assert output.token_ids == tokens[: place + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", tokens[place])
