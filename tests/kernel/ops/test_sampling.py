"""Sampling: masks and penalties against transformers' logits processors, draws against their distribution."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rtp_kernel.ops.sampling import logprobs, penalize, restrict, sample, uniform

ROWS, VOCAB = 6, 97


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def _rows(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((ROWS,), value, dtype=dtype)


def _restrict(logits: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    return restrict(logits, _rows(top_k, torch.long), _rows(top_p), _rows(min_p))


@pytest.mark.parametrize("k", [1, 5, 96, 97, 200])
def test_top_k_is_that_of_transformers(logits: Tensor, k: int) -> None:
    assert torch.equal(_restrict(logits, top_k=k), TopKLogitsWarper(k)(None, logits))


@pytest.mark.parametrize("p", [0.01, 0.4, 0.9, 0.999])
def test_top_p_is_that_of_transformers(logits: Tensor, p: float) -> None:
    assert torch.equal(_restrict(logits, top_p=p), TopPLogitsWarper(p)(None, logits))


@pytest.mark.parametrize("p", [0.01, 0.2, 1.0])
def test_min_p_is_that_of_transformers(logits: Tensor, p: float) -> None:
    assert torch.equal(_restrict(logits, min_p=p), MinPLogitsWarper(p)(None, logits))


def test_all_three_apply_in_transformers_order(logits: Tensor) -> None:
    want = MinPLogitsWarper(0.1)(None, TopPLogitsWarper(0.8)(None, TopKLogitsWarper(20)(None, logits)))
    assert torch.equal(_restrict(logits, 20, 0.8, 0.1), want)


def test_each_row_has_its_own_limits(logits: Tensor) -> None:
    top_k = torch.tensor([0, 3, 0, 7, 97, -1])
    top_p = torch.tensor([1.0, 1.0, 0.5, 0.9, 1.0, 1.0])
    got = restrict(logits, top_k, top_p, torch.zeros(ROWS))
    for row in range(ROWS):
        alone = restrict(logits[row : row + 1], top_k[row : row + 1], top_p[row : row + 1], torch.zeros(1))
        assert torch.equal(got[row : row + 1], alone)
    assert torch.equal(got[0], logits[0])


def test_top_k_among_equals_keeps_the_lower_ids() -> None:
    kept = _restrict(torch.zeros(ROWS, VOCAB), top_k=4).isfinite()
    assert kept[0].nonzero().flatten().tolist() == [0, 1, 2, 3]


def _sample(logits: Tensor, temperature: float = 1.0, seed: int = 0, position: int = 0, top_k: int = 0) -> Tensor:
    rows = len(logits)
    return sample(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.ones(rows),
        torch.zeros(rows),
        torch.full((rows,), seed),
        torch.full((rows,), position),
    )


def test_temperature_zero_is_the_lowest_best_id() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 40] = logits[1, 60] = 2.0
    assert _sample(logits, temperature=0.0).tolist() == [0, 40, 0]


def test_a_row_does_not_depend_on_the_others(logits: Tensor) -> None:
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0, 1.0, 0.7])
    top_k, top_p = torch.tensor([0, 0, 5, 0, 0, 9]), torch.tensor([1.0, 0.9, 1.0, 1.0, 0.3, 1.0])
    seeds, positions = torch.arange(ROWS) * 1_000_003, torch.arange(ROWS) * 7
    arguments = (temperature, top_k, top_p, torch.zeros(ROWS), seeds, positions)
    together = sample(logits, *arguments)
    for row in range(ROWS):
        part = slice(row, row + 1)
        assert together[part].tolist() == sample(logits[part], *(argument[part] for argument in arguments)).tolist()


def test_draws_follow_the_distribution() -> None:
    logits, draws = torch.tensor([0.0, 1.0, -1.0, float("-inf"), 0.5]), 20_000
    counts = torch.zeros(5)
    ids = sample(
        logits.expand(draws, 5),
        torch.full((draws,), 0.8),
        torch.zeros(draws, dtype=torch.long),
        torch.ones(draws),
        torch.zeros(draws),
        torch.full((draws,), 1234),
        torch.arange(draws),
    )
    counts = torch.bincount(ids, minlength=5) / draws
    assert torch.allclose(counts, torch.softmax(logits / 0.8, -1), atol=0.012)
    assert counts[3] == 0


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_uniform_numbers_are_uniform_in_seed_and_position(vary: str) -> None:
    count = torch.arange(40_000)
    fixed = torch.full_like(count, 7)
    numbers = uniform(count, fixed) if vary == "seed" else uniform(fixed, count)
    assert bool(((numbers >= 0) & (numbers < 1)).all())
    assert abs(float(numbers.mean()) - 0.5) < 0.005
    assert abs(float(numbers.var()) - 1 / 12) < 0.002
    assert abs(float(torch.corrcoef(torch.stack((numbers[1:], numbers[:-1])))[0, 1])) < 0.02
    assert numbers.unique().numel() == numbers.numel()


def test_seeds_use_all_their_bits() -> None:
    seeds = torch.tensor([5, 5 + 2**32, 5 + 2**62, -5, -5 - 2**40])
    assert uniform(seeds, torch.zeros_like(seeds)).unique().numel() == len(seeds)


def test_repetition_penalty_is_that_of_transformers(logits: Tensor) -> None:
    prompt = torch.tensor([[3, 5, 5, 90]] * ROWS)
    mask = torch.zeros(ROWS, VOCAB, dtype=torch.bool).scatter_(1, prompt, True)
    off = _rows(0.0)
    got = penalize(logits, mask, torch.zeros(ROWS, VOCAB), _rows(1.3), off, off)
    assert torch.equal(got, RepetitionPenaltyLogitsProcessor(1.3)(prompt, logits.clone()))
    counted = torch.zeros(ROWS, VOCAB).scatter_add_(1, prompt, torch.ones(ROWS, 4))
    assert torch.equal(penalize(logits, torch.zeros_like(mask), counted, _rows(1.3), off, off), got)


def test_presence_and_frequency_penalties_count_the_output_only(logits: Tensor) -> None:
    counts = torch.zeros(ROWS, VOCAB)
    counts[:, 8], counts[:, 9] = 1, 3
    mask = torch.ones(ROWS, VOCAB, dtype=torch.bool)
    got = penalize(logits, mask, counts, _rows(1.0), _rows(0.5), _rows(0.25))
    change = torch.zeros(VOCAB)
    change[8], change[9] = -0.75, -1.25
    assert torch.allclose(got - logits, change.expand(ROWS, VOCAB), atol=1e-6)


def test_logprobs_are_those_of_log_softmax(logits: Tensor) -> None:
    ids = torch.arange(ROWS)
    chosen, best, best_ids = logprobs(logits, ids, 4)
    logs = torch.log_softmax(logits.double(), -1)
    assert torch.allclose(chosen.double(), logs[ids, ids], atol=1e-5)
    assert torch.equal(best_ids, logs.topk(4).indices)
    assert torch.allclose(best.double(), logs.topk(4).values, atol=1e-5)
