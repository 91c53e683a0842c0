"""The interface holds for every kind of state: the toy model equals its oracle, number for number, however run."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import oracle
from toy.driver import Driver, Step
from toy.numbers import VOCAB, ToyConfig

from rtp_runtime.state import StepRow

CONFIGS = pytest.mark.parametrize("config", [ToyConfig((4,)), ToyConfig((4, 32))], ids=["shared table", "own table"])


def drawn(seed: int, count: int) -> list[int]:
    return [random.Random(seed * 1000 + k).randrange(VOCAB) for k in range(count)]


@CONFIGS
def test_a_whole_prefill(config: ToyConfig) -> None:
    tokens = {"a": drawn(1, 75)}
    driver = Driver(config)
    assert driver.run(StepRow("a", 0, 75), tokens=tokens)["a"] == oracle.logits(tokens["a"], config)


@CONFIGS
@pytest.mark.parametrize("size", [1, 3, 8, 16, 31])
def test_chunks(config: ToyConfig, size: int) -> None:
    tokens = {"a": drawn(2, 70)}
    driver = Driver(config)
    found: list[list[int]] = []
    for start in range(0, 70, size):
        found += driver.run(StepRow("a", start, min(size, 70 - start)), tokens=tokens, padding=start % 3)["a"]
    assert found == oracle.logits(tokens["a"], config)


@CONFIGS
def test_mixed_steps_of_decodes_and_chunks_with_padding(config: ToyConfig) -> None:
    tokens = {"a": drawn(3, 50), "b": drawn(4, 40), "c": drawn(5, 33)}
    expected = {name: oracle.logits(each, config) for name, each in tokens.items()}
    driver = Driver(config)
    found: dict[str, list[list[int]]] = {name: [] for name in tokens}
    sizes = {"a": [20] + [1] * 30, "b": [0] * 4 + [9, 9, 9] + [1] * 13, "c": [0] * 8 + [33]}
    for step in range(31):
        rows = [
            StepRow(name, len(found[name]), sizes[name][step])
            for name in tokens
            if step < len(sizes[name]) and sizes[name][step]
        ]
        for name, logits in driver.run(*rows, tokens=tokens, padding=2).items():
            found[name] += logits
    assert found == expected


@CONFIGS
def test_preemption_and_recomputation(config: ToyConfig) -> None:
    tokens = {"a": drawn(6, 60), "b": drawn(7, 60)}
    driver = Driver(config)
    for name in tokens:
        driver.run(StepRow(name, 0, 37), tokens=tokens)
    driver.state.release("b")
    driver.state.poison()
    assert driver.run(StepRow("a", 37, 23), tokens=tokens)["a"] == oracle.logits(tokens["a"], config)[37:]
    driver.state.release("a")
    assert driver.run(StepRow("b", 0, 60), tokens=tokens)["b"] == oracle.logits(tokens["b"], config)


@CONFIGS
def test_restore_from_a_snapshot_under_two_continuations(config: ToyConfig) -> None:
    prefix = drawn(8, 64)
    tokens = {"a": prefix + drawn(9, 10), "b": prefix + drawn(10, 9), "c": prefix[:32] + drawn(11, 30)}
    driver = Driver(config)
    driver.run(StepRow("a", 0, 10), tokens=tokens)
    half = driver.state.snapshot("a", 32)
    driver.run(StepRow("a", 10, 54), tokens=tokens)
    whole = driver.state.snapshot("a")
    assert half is not None and whole is not None
    driver.state.release("a")
    driver.state.poison()
    for name, holding in (("a", whole), ("b", whole), ("c", half)):
        assert driver.state.restore(name, holding) == (32 if name == "c" else 64)
    driver.state.let_go(half)
    rows = [StepRow("a", 64, 1), StepRow("b", 64, 4), StepRow("c", 32, 30)]
    found = driver.run(*rows, tokens=tokens)
    driver.state.let_go(whole)
    driver.state.poison()
    for name, logits in driver.run(StepRow("b", 68, 5), StepRow("a", 65, 9), tokens=tokens).items():
        found[name] += logits
    for row in rows:
        assert found[str(row.request)] == oracle.logits(tokens[str(row.request)], config)[row.start :]


@CONFIGS
def test_a_pipeline_two_steps_deep(config: ToyConfig) -> None:
    """Steps are submitted before two older ones are collected, and a request ends while steps of it are in flight."""
    tokens = {"a": drawn(12, 60), "b": drawn(13, 60), "c": drawn(14, 60)}
    driver = Driver(config, num_blocks=12)
    found: dict[str, list[list[int]]] = {name: [] for name in tokens}
    flying: list[Step] = []
    plan = [[("a", 17), ("b", 20)], *([("a", 1), ("b", 1)] for _ in range(6)), [("a", 1), ("c", 30)]]
    for shares in [*plan, *([("a", 1), ("c", 1)] for _ in range(30))]:
        if shares[-1][0] == "c" and "b" in tokens:
            driver.state.release("b")
            del tokens["b"]
        rows = [StepRow(name, len(found[name]), size) for name, size in shares]
        flying.append(driver.submit(*rows, tokens=tokens, padding=1))
        for name, logits in flying[-1].logits.items():
            found[name] += logits
        if len(flying) > 2:
            driver.collect(flying.pop(0))
    for name in ("a", "c"):
        assert found[name] == oracle.logits(tokens[name], config)[: len(found[name])]
        assert len(found[name]) > 50


@CONFIGS
@pytest.mark.parametrize("start", [29, 30, 31, 32])
def test_rejected_drafts(config: ToyConfig, start: int) -> None:
    """Of one fed token and three drafts, the first 0 to 3 drafts turn out right; the wrong ones leave no trace."""
    right = drawn(15, 70)
    expected = oracle.logits(right, config)
    driver = Driver(config)
    tokens = {"a": right, "b": drawn(16, 40)}
    driver.run(StepRow("a", 0, start), StepRow("b", 0, 9), tokens=tokens)
    place = start
    for accepted in [0, 1, 2, 3, 0, 3, 2, 1, 0]:
        drafts = right[: place + 1 + accepted] + [(token + 1) % VOCAB for token in right[place + 1 + accepted :]]
        step = driver.submit(StepRow("a", place, 4, drafts=3), tokens={"a": drafts})
        kept = place + 1 + accepted
        assert step.logits["a"][: kept - place] == expected[place:kept]
        driver.collect(step, {"a": kept} if accepted < 3 else None)
        driver.state.poison()
        place = kept
    assert driver.run(StepRow("a", place, 70 - place), tokens=tokens)["a"] == expected[place:]
    assert driver.run(StepRow("b", 9, 31), tokens=tokens)["b"] == oracle.logits(tokens["b"], config)[9:]


SHARES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 14), st.integers(0, 3)), min_size=1, max_size=3)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(SHARES, st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=12))
def test_any_schedule(plan: list[tuple[list[tuple[str, int, int]], int, int]]) -> None:
    """Any mixture of chunks, drafts and preemptions gives each request the numbers of its own tokens."""
    config = ToyConfig((4,))
    driver = Driver(config, block_size=8)
    right = {name: drawn(ord(name), 60) for name in "abc"}
    expected = {name: oracle.logits(tokens, config) for name, tokens in right.items()}
    done = dict.fromkeys("abc", 0)
    for shares, preempted, accepted in plan:
        rows, tokens, kept = [], {}, {}
        for name, size, drafts in {share[0]: share for share in shares}.values():
            size = min(size, 60 - done[name])
            drafts = min(drafts, size - 1)
            if size < 1:
                continue
            end = done[name] + size - drafts + min(accepted, drafts)
            tokens[name] = right[name][:end] + [(token + 3) % VOCAB for token in right[name][end:]]
            if end < done[name] + size:
                kept[name] = end
            rows.append(StepRow(name, done[name], size, drafts))
        step = driver.submit(*rows, tokens=tokens, padding=accepted)
        driver.collect(step, kept)
        for row in rows:
            end = kept.get(str(row.request), row.start + row.num_tokens)
            assert step.logits[str(row.request)][: end - row.start] == expected[str(row.request)][row.start : end]
            done[str(row.request)] = end
        if preempted < 3:
            driver.state.release("abc"[preempted])
            done["abc"[preempted]] = 0
        driver.state.poison()
