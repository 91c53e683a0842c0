"""Errors, pairs and prompts in numbers."""

from __future__ import annotations

import math

import pytest
import torch

from rtp_runtime.check.compare import RelativeError, logits_error, tolerance
from rtp_runtime.check.pairs import pair_tensors
from rtp_runtime.check.prompts import PromptLimits, make_prompts
from rtp_runtime.check.report import NOT_FINITE, finite


def test_relative_error_is_rms_over_rms() -> None:
    reference = torch.full((4, 3), 2.0)
    error = RelativeError()
    error.add(reference + 0.02, reference, torch.arange(4))
    assert error.value == pytest.approx(0.01, rel=1e-5)
    assert error.num_tokens == 4


def test_relative_error_adds_calls_up() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, reference = torch.randn(2, 10, 5, generator=generator)
    whole, parts = RelativeError(), RelativeError()
    whole.add(ours, reference, torch.arange(10))
    parts.add(ours[:3], reference[:3], torch.arange(3))
    parts.add(ours[3:], reference[3:], torch.arange(3, 10))
    assert parts.value == pytest.approx(whole.value)
    assert parts.worst_token == whole.worst_token


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_wrong(value: float) -> None:
    reference = torch.ones(3, 2)
    ours = reference.clone()
    ours[1, 0] = value
    error = RelativeError()
    error.add(ours, reference, torch.arange(3))
    assert math.isinf(error.value)
    assert error.worst_token == 1
    assert math.isinf(logits_error(ours, reference).value)
    assert finite(error.value) == NOT_FINITE


def test_logits_error_is_in_standard_deviations() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(100, 50, generator=generator) * 4
    ours = reference.clone()
    ours[70, 3] += 1.0
    error = logits_error(ours, reference)
    assert error.value == pytest.approx(1.0 / float(reference.std()), rel=1e-4)
    assert error.token == 70


def test_tolerance_follows_the_references_noise() -> None:
    assert tolerance(2e-5, 1e-6) == 2e-5
    assert tolerance(2e-5, 1e-5) == pytest.approx(3e-5)
    assert tolerance(2e-5, math.inf) == 2e-5


def test_routes_are_compared_whatever_their_order() -> None:
    ids, weights = torch.tensor([[0, 2], [1, 3]]), torch.tensor([[0.7, 0.3], [0.6, 0.4]])
    pair = pair_tensors([weights.flip(-1), ids.flip(-1)], [torch.randn(2, 4), weights, ids]).pairs[0]
    assert torch.equal(pair.ours, pair.reference)
    assert pair.changed is not None and not pair.changed.any()


def test_other_experts_are_a_tie_only_if_the_reference_scores_them_alike() -> None:
    scores = torch.tensor([[2.0, 1.0, 1.0, -3.0], [2.0, 1.0, 0.5, -3.0]])
    weights = torch.full((2, 2), 0.5)
    ours, reference = torch.tensor([[0, 2], [0, 2]]), torch.tensor([[0, 1], [0, 1]])
    pair = pair_tensors([weights, ours], [scores, weights, reference]).pairs[0]
    assert pair.changed is not None and pair.changed.tolist() == [True, True]
    assert pair.ties is not None and pair.ties.tolist() == [True, False]


def test_another_number_of_experts_is_no_tie() -> None:
    scores = torch.tensor([[2.0, 1.0, 0.5, -3.0]])
    ours, reference = torch.tensor([[0, 1]]), torch.tensor([[0, 1, 2]])
    pair = pair_tensors([torch.full((1, 2), 0.5), ours], [scores, torch.full((1, 3), 0.33), reference]).pairs[0]
    assert pair.ties is not None and not pair.ties.any()


def test_tensors_of_other_shapes_are_reported() -> None:
    pairing = pair_tensors([torch.arange(24.0).reshape(3, 8)], [torch.ones(3, 4)])
    assert not pairing.pairs
    assert len(pairing.unmatched) == 1


def test_prompts_cross_windows_and_reach_far() -> None:
    prompts = make_prompts(PromptLimits(vocab_size=384, max_tokens=2000, windows=(300,)), 0, None)
    assert max(map(len, prompts)) > 600
    assert (
        make_prompts(PromptLimits(384, 2000), 0, None)[-1].ids == make_prompts(PromptLimits(384, 2000), 0, None)[-1].ids
    )
    assert max(map(len, make_prompts(PromptLimits(384, 2000), 0, None))) >= 300
    assert max(map(len, make_prompts(PromptLimits(384, 100, windows=(80,)), 0, None))) == 100


def test_texts_are_used_where_there_is_a_tokenizer() -> None:
    prompts = make_prompts(PromptLimits(128, 1000), 0, lambda text: [ord(c) % 128 for c in text], ["mine"])
    assert ("your prompt 1", (109, 105, 110, 101)) in [(prompt.name, prompt.ids) for prompt in prompts]
    assert max(map(len, prompts)) >= 300
