"""What sampling may choose, against transformers' own processors; the penalties' counts over a request's life."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rtp_runtime.engine import SamplingParams
from rtp_runtime.engine.request import Request
from rtp_runtime.engine.sampler import Sampler, row_logprobs
from rtp_runtime.engine.scheduler import Chunk

VOCAB = 24
PROMPT = [1, 2, 3, 4, 5]


def request(params: SamplingParams, seed: int = 0, **more: Any) -> Request:
    return Request(
        "r",
        np.array(PROMPT),
        params,
        arrival=0,
        limit=4000,
        seed=params.seed if params.seed is not None else seed,
        **more,
    )


def chunk(each: Request, index: int) -> Chunk:
    return Chunk(each, 9, 1, True, True, index, 0)


@pytest.fixture
def logits() -> Tensor:
    return torch.randn((1, VOCAB), generator=torch.Generator().manual_seed(3)) * 2


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(VOCAB, torch.device("cpu"))


CASES = {
    "temperature": ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
    "top k": ({"temperature": 1.3, "top_k": 4}, [TemperatureLogitsWarper(1.3), TopKLogitsWarper(4)]),
    "top p": ({"temperature": 1.0, "top_p": 0.6}, [TopPLogitsWarper(0.6)]),
    "min p": ({"temperature": 1.0, "min_p": 0.2}, [MinPLogitsWarper(0.2)]),
    "all": (
        {"temperature": 0.9, "top_k": 12, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.7},
        [
            RepetitionPenaltyLogitsProcessor(1.7),
            TemperatureLogitsWarper(0.9),
            TopKLogitsWarper(12),
            TopPLogitsWarper(0.8),
            MinPLogitsWarper(0.05),
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_distribution(case: str, sampler: Sampler, logits: Tensor) -> None:
    """2,000 draws never leave the support that transformers computes, and follow its probabilities."""
    options, processors = CASES[case]
    expected = LogitsProcessorList(processors)(torch.tensor([PROMPT]), logits.clone()).softmax(-1)[0]
    num = 2000
    drawn: list[int] = []
    for seed in range(num // 50):
        # A fresh request per seed, so that the penalty sees the prompt only; 50 rows at 50 positions.
        rows = [request(SamplingParams(**options, seed=seed)) for _ in range(50)]
        chunks = [chunk(each, index) for index, each in enumerate(rows)]
        drawn += sampler.sample(logits.expand(50, -1), chunks).tolist()
        for each in rows:
            sampler.release(each)
    counts = Counter(drawn)
    assert all(expected[id_] > 0 for id_ in counts)
    seen = torch.tensor([counts[id_] / num for id_ in range(VOCAB)])
    assert (seen - expected).abs().max() < 5 * (0.25 / num) ** 0.5


def test_penalties_follow_the_output(sampler: Sampler) -> None:
    """Greedy under penalties, against the definitions applied to the whole history at every step."""
    params = SamplingParams(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.5)
    each = request(params)
    fixed = torch.randn((1, VOCAB), generator=torch.Generator().manual_seed(1)) * 0.7
    output: list[int] = []
    for index in range(12):
        want = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([PROMPT + output]), fixed.clone())[0]
        for id_, count in Counter(output).items():
            want[id_] -= 0.3 + 0.5 * count
        got = int(sampler.sample(fixed, [chunk(each, index)])[0])
        assert got == int(want.argmax())
        output.append(got)
    assert len(set(output)) > 3


def test_a_released_row_is_clean(sampler: Sampler, logits: Tensor) -> None:
    params = SamplingParams(frequency_penalty=2.0)
    first = request(params)
    tokens = [int(sampler.sample(logits, [chunk(first, index)])[0]) for index in range(4)]
    sampler.release(first)
    again = request(params)
    assert [int(sampler.sample(logits, [chunk(again, index)])[0]) for index in range(4)] == tokens


def test_mixed_rows_are_what_each_is_alone(sampler: Sampler) -> None:
    options = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(repetition_penalty=3.0),
        SamplingParams(temperature=0.8, top_k=3, seed=6),
        SamplingParams(temperature=2.0, presence_penalty=1.0, seed=7),
        SamplingParams(min_tokens=3),
    ]
    logits = torch.randn((len(options), VOCAB), generator=torch.Generator().manual_seed(2))
    kept = logits.clone()

    def requests() -> list[Request]:
        return [request(each, stop_ids=frozenset({int(logits[5].argmax())})) for each in options]

    mixed = requests()
    together = [sampler.sample(logits, [chunk(each, index) for each in mixed]).tolist() for index in range(5)]
    alone = requests()
    for index in range(5):
        ids = [int(sampler.sample(logits[row : row + 1], [chunk(each, index)])[0]) for row, each in enumerate(alone)]
        assert ids == together[index]
    assert together[2][5] != int(logits[5].argmax()) == together[3][5]
    assert torch.equal(logits, kept)


def test_logprobs(logits: Tensor) -> None:
    ids = torch.tensor([7])
    rows = row_logprobs(logits, ids, 3)
    logs = logits.log_softmax(-1)[0]
    order = logs.sort(descending=True).indices.tolist()
    assert rows.ranks.tolist() == [order.index(7) + 1]
    assert rows.ids.tolist() == [order[:3]]
    torch.testing.assert_close(rows.chosen, logs[ids])
    torch.testing.assert_close(rows.values[0], logs[order[:3]])
