"""Prefixes shared between requests, on a model with a layer of every kind of state: nothing changes but the work.

Outputs equal the oracle's exactly, with what nobody owns poisoned whenever no step is in flight.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy import oracle
from toy.finish import finish
from toy.model import ToyForCausalLM, state_descriptors
from toy.numbers import VOCAB, ToyConfig

from rtp_runtime.engine import EngineConfig, RequestOutput, SamplingParams
from rtp_runtime.engine.engine import Engine
from rtp_runtime.errors import UsageError
from rtp_runtime.state import SlotState, Snapshots, StateDescriptors

CONFIG = ToyConfig((4,))
COUNT = 6
GREEDY = SamplingParams(max_tokens=COUNT)
Prompt = tuple[int, ...]


def drawn(seed: int, count: int) -> Prompt:
    source = random.Random(seed)
    return tuple(source.randrange(VOCAB) for _ in range(count))


@functools.cache
def continuation(prompt: Prompt, config: ToyConfig = CONFIG) -> list[int]:
    return oracle.generate(prompt, COUNT, config)


def toy(path: Path, config: ToyConfig = CONFIG) -> Any:
    return SimpleNamespace(
        module=ToyForCausalLM(config),
        config=SimpleNamespace(raw={"vocab_size": VOCAB, "max_position_embeddings": 96, "eos_token_id": None}, hf=None),
        states=state_descriptors(config),
        dtype=torch.float32,
        device="cpu",
        path=path,
        ops=SimpleNamespace(deterministic=False),
        fingerprint="",
        state_policies={},
    )


@pytest.fixture
def loaded(tmp_path: Path) -> Any:
    return toy(tmp_path)


def engine_of(loaded: Any, proposer: Any = None, **limits: Any) -> Engine:
    defaults = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 4}
    return Engine(loaded, EngineConfig(**(defaults | limits)), proposer=proposer)


def run(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams = GREEDY, preempt_every: int = 0, **options: Any
) -> list[RequestOutput]:
    ids = [engine.add(prompt, params, **options) for prompt in prompts]
    return finish(engine, ids, preempt_every)


def check(outputs: Sequence[RequestOutput], prompts: Sequence[Prompt]) -> None:
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.token_ids == continuation(prompt)


def returns_all(engine: Engine) -> None:
    """Nothing is held but by the cache, and that gives all back."""
    assert not engine._state._requests
    for pool in engine._state._pools:
        assert pool.num_held == pool.num_cached
    engine.clear_prefixes()
    assert engine.stats.prefix_bytes == 0
    assert engine._state.arena.num_free == engine._state.arena.plan.num_extents


def test_the_same_prompt_again_computes_what_is_left_of_its_last_unit(loaded: Any) -> None:
    engine = engine_of(loaded)
    prompt = drawn(1, 30)
    for hit in (0, 28, 28):
        (output,) = run(engine, [prompt])
        assert (output.token_ids, output.num_cached_tokens) == (continuation(prompt), hit)
    # A token is always left to compute, also where the prompt ends with a unit.
    even = drawn(2, 32)
    assert [run(engine, [even])[0].num_cached_tokens for _ in range(3)] == [0, 28, 28]
    assert (engine.stats.prefix_lookups, engine.stats.prefix_hits) == (6, 4)
    assert (engine.stats.lookup_tokens, engine.stats.cached_tokens) == (3 * 30 + 3 * 32, 4 * 28)
    returns_all(engine)


def test_a_conversation_goes_on_from_its_last_answer(loaded: Any) -> None:
    engine = engine_of(loaded)
    prompt, cached = drawn(3, 21), 0
    for turn in range(4):
        (output,) = run(engine, [prompt])
        assert (output.token_ids, output.num_cached_tokens) == (continuation(prompt), cached)
        # The last sampled token was never fed.
        cached = (len(prompt) + COUNT - 1) // 4 * 4
        prompt = (*prompt, *output.token_ids, *drawn(30 + turn, 5))
    returns_all(engine)


def test_where_prompts_part_a_copy_is_left_for_the_third(loaded: Any) -> None:
    engine = engine_of(loaded)
    shared = drawn(4, 37)
    prompts = [(*shared, *drawn(40 + k, 11)) for k in range(4)]
    outputs = [run(engine, [prompt])[0] for prompt in prompts]
    check(outputs, prompts)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 36, 36]
    returns_all(engine)


def test_states_without_slots_are_shared_at_once_where_prompts_part(loaded: Any) -> None:
    own = loaded.states
    kept = [0, 1, len(own) - 1]
    loaded.states = type(own)([own[layer] for layer in kept])
    layers = loaded.module.layers
    loaded.module.layers = type(layers)([layers[layer] for layer in kept])
    fresh, engine = engine_of(loaded, prefix_caching=False), engine_of(loaded)
    shared = drawn(4, 37)
    prompts = [(*shared, *drawn(40 + k, 11)) for k in range(3)]
    expected = [run(fresh, [prompt])[0].token_ids for prompt in prompts]
    outputs = [run(engine, [prompt])[0] for prompt in prompts]
    assert [output.token_ids for output in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [0, 36, 36]
    assert fresh.stats.prefix_lookups == 0
    returns_all(engine)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("preempt", [0, 3])
@pytest.mark.parametrize("config", [CONFIG, ToyConfig((4, 32))], ids=["one table", "two tables"])
def test_mixed_steps(tmp_path: Path, depth: int, chunk: int | None, preempt: int, config: ToyConfig) -> None:
    wide = 32 in config.ratios
    # With 32 tokens per entry prefixes end at multiples of 32.
    sizes = {"block_size": None, "num_blocks": 24} if wide else {}
    limits = {"depth": depth, "max_chunk_tokens": chunk, "max_num_batched_tokens": 24}
    engine = engine_of(toy(tmp_path, config), **(sizes | limits))
    shared = drawn(5, 66 if wide else 25)
    prompts = [(*shared[: len(shared) - cut], *drawn(50 + cut, 3 + cut)) for cut in (0, 0, 1, 9, 20, 24)]
    for _ in range(2):
        outputs = run(engine, prompts, preempt_every=preempt)
        assert [output.token_ids for output in outputs] == [continuation(prompt, config) for prompt in prompts]
    assert engine.stats.prefix_hits >= len(prompts) - 1
    assert bool(engine.num_preemptions) == bool(preempt)
    returns_all(engine)


@pytest.mark.parametrize("depth", [0, 2])
def test_little_memory_evicts_and_preempts(loaded: Any, depth: int) -> None:
    engine = engine_of(loaded, depth=depth, num_blocks=18, max_num_seqs=3)
    families = [drawn(60 + k, 18) for k in range(5)]
    prompts = [(*families[k // 8], *drawn(70 + k, 4 + k % 7)) for k in range(32)]
    for _ in range(2):
        check(run(engine, prompts), prompts)
    assert engine.stats.prefix_evictions > 20
    assert engine.stats.prefix_hits > 0
    returns_all(engine)


class Script:
    """Proposes the right continuation, of which every `wrong`th token is false."""

    max_drafts = 3

    def __init__(self, prompts: Sequence[Prompt], wrong: int) -> None:
        self.prompts = prompts
        self.wrong = wrong

    def propose(self, request_id: str, token_ids: Sequence[int], limit: int) -> list[int]:
        prompt = max((p for p in self.prompts if tuple(token_ids[: len(p)]) == p), key=len)
        done = len(token_ids) - len(prompt)
        right = continuation(prompt)[done : done + limit]
        return [(token + 1) % VOCAB if (done + k) % self.wrong == 0 else token for k, token in enumerate(right)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("wrong", [1, 2, 3, 100])
def test_rejected_drafts_are_not_published(loaded: Any, depth: int, wrong: int) -> None:
    prompts = [drawn(80 + k, 17 + k) for k in range(4)]
    longer = [(*prompt, *continuation(prompt), *drawn(90, 4)) for prompt in prompts]
    engine = engine_of(loaded, Script([*prompts, *longer], wrong), depth=depth)
    check(run(engine, prompts), prompts)
    outputs = run(engine, longer)
    check(outputs, longer)
    check(run(engine, longer, preempt_every=4), longer)
    assert [output.num_cached_tokens for output in outputs] == [(17 + k + COUNT - 1) // 4 * 4 for k in range(4)]
    returns_all(engine)


def test_what_follows_a_stop_is_not_published(loaded: Any) -> None:
    prompt = drawn(7, 20)
    tokens = continuation(prompt)
    assert tokens[1] not in tokens[:1]
    stop = SamplingParams(max_tokens=COUNT, stop_token_ids=[tokens[1]])
    engine = engine_of(loaded, Script([prompt], 100))
    (output,) = run(engine, [prompt], stop)
    assert output.token_ids == tokens[:2]
    # 20 tokens and the 2 that stand; two drafts beyond them were fed and right, and would fill the next unit.
    prefixes = engine._state.prefixes
    assert prefixes is not None
    assert max(node.end for node in prefixes._nodes.values()) == 20
    returns_all(engine)


def test_requests_that_need_every_position_compute_it(loaded: Any) -> None:
    engine = engine_of(loaded)
    prompt = drawn(8, 23)
    for _ in range(2):
        (output,) = run(engine, [prompt], return_logits=True)
        assert output.logits is not None
        assert output.logits.tolist() == oracle.logits([*prompt, *output.token_ids], CONFIG)[: len(output.logits)]
        (scored,) = run(engine, [prompt], SamplingParams(max_tokens=2, prompt_logprobs=1))
        assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == 23
        assert (output.num_cached_tokens, scored.num_cached_tokens) == (0, 0)
    assert engine.stats.prefix_lookups == 0
    # They leave what they compute to others.
    assert run(engine, [prompt])[0].num_cached_tokens == 20


def test_requests_of_different_salts_share_nothing(loaded: Any) -> None:
    engine = engine_of(loaded)
    prompt = drawn(9, 30)
    hits = []
    for salt in (None, "a", "b", "a", None, "", ""):
        (output,) = run(engine, [prompt], SamplingParams(max_tokens=COUNT, cache_salt=salt))
        assert output.token_ids == continuation(prompt)
        hits.append(output.num_cached_tokens)
    assert hits == [0, 0, 0, 28, 28, 0, 28]


def with_slots(states: StateDescriptors, **policy: Any) -> StateDescriptors:
    """The states with other policies for slots."""
    return StateDescriptors(
        [
            {name: replace(state, **policy) if isinstance(state, SlotState) else state for name, state in layer.items()}
            for layer in states
        ]
    )


def test_policies_are_chosen_by_name(loaded: Any) -> None:
    everywhere = Snapshots(prompt_end=False, branch=False, latest=False, every=4)
    loaded.state_policies = {
        "dense": with_slots(loaded.states, retention=everywhere, capacity=1.0),
        "private": with_slots(loaded.states, reuse="none"),
    }
    shared = drawn(10, 37)
    prompts = [(*shared, *drawn(130 + k, 11)) for k in range(3)]
    found = {}
    for policy in (None, "dense", "private"):
        engine = engine_of(loaded, state_policy=policy, num_blocks=90)
        outputs = [run(engine, [prompt])[0] for prompt in prompts]
        check(outputs, prompts)
        found[policy] = [output.num_cached_tokens for output in outputs]
        returns_all(engine)
    assert found == {None: [0, 0, 36], "dense": [0, 36, 36], "private": [0, 0, 0]}
    with pytest.raises(UsageError, match="'sparse' is not registered for this model; registered are: 'dense', 'priv"):
        engine_of(loaded, state_policy="sparse")


def test_weights_and_declarations_are_part_of_every_key(loaded: Any) -> None:
    def first(**changes: Any) -> bytes:
        other = SimpleNamespace(**(vars(loaded) | changes))
        return engine_of(other)._namespace

    names = [first(), first(fingerprint="other"), first(dtype=torch.bfloat16)]
    assert len(set(names)) == 3 and first() == names[0]


def test_a_budget_bounds_what_is_kept(loaded: Any) -> None:
    for budget in (200, 4000, 12000):
        engine = engine_of(loaded, prefix_cache_memory=budget)
        prompts = [drawn(100 + k, 25 + k) for k in range(6)]
        for _ in range(2):
            check(run(engine, prompts), prompts)
            assert engine.stats.prefix_bytes <= budget
        returns_all(engine)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=9),
    cancels=st.dictionaries(st.integers(0, 8), st.integers(0, 25), max_size=2),
    blocks=st.integers(16, 30),
    chunk=st.none() | st.integers(1, 9),
    seqs=st.integers(1, 3),
    depth=st.integers(0, 2),
    wrong=st.none() | st.integers(1, 4),
)
def test_any_company_at_any_time(
    loaded: Any,
    arrivals: list[tuple[int, int, int]],
    cancels: dict[int, int],
    blocks: int,
    chunk: int | None,
    seqs: int,
    depth: int,
    wrong: int | None,
) -> None:
    families = [drawn(110 + k, 30) for k in range(3)]
    prompts = [families[family][:length] for _, family, length in arrivals]
    proposer = None if wrong is None else Script(prompts, wrong)
    limits = {"max_num_seqs": seqs, "max_chunk_tokens": chunk, "max_num_batched_tokens": 16, "depth": depth}
    engine = engine_of(loaded, proposer, num_blocks=blocks, **limits)
    for now in range(2000):
        for place, (at, _, _) in enumerate(arrivals):
            if at == now:
                engine.add(prompts[place], GREEDY, request_id=str(place))
            if cancels.get(place) == now:
                engine.cancel(str(place))
        if not engine._tickets:
            engine._state.poison()
        for news in engine.step():
            if news.finish_reason is not None:
                output = engine.output(news.request_id)
                assert output.token_ids == continuation(prompts[int(news.request_id)])
        if now > 30 and not engine.has_work:
            break
    assert not engine.has_work
    returns_all(engine)
