"""Who is asked for drafts, and how many count as right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rtp_runtime.engine import SamplingParams
from rtp_runtime.engine.drafts import num_accepted, propose_drafts
from rtp_runtime.engine.request import Request


class Counting:
    """Proposes 0, 1, 2 … and notes what it was asked."""

    max_drafts = 3

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int], int]] = []

    def propose(self, request_id: str, token_ids: Sequence[int], limit: int) -> range:
        self.asked.append((request_id, list(token_ids), limit))
        return range(limit)


def request(
    name: str, *, fed: int, in_flight: int = 0, limit: int = 9, params: SamplingParams | None = None
) -> Request:
    """Five prompt tokens and one sampled; `fed` of these six are computed."""
    made = Request(name, np.arange(5), params or SamplingParams(), arrival=0, limit=limit, seed=0)
    made.ids, made.num_outputs, made.num_tokens, made.num_computed, made.in_flight = [7], 1, 6, fed, in_flight
    return made


def test_drafts_follow_the_one_token_that_is_fed_next_when_the_host_knows_it() -> None:
    proposer = Counting()
    penalised = SamplingParams(repetition_penalty=1.1)
    requests = [
        request("decodes", fed=5),
        request("prefills", fed=2),
        request("in flight", fed=5, in_flight=1),
        request("penalised", fed=5, params=penalised),
        request("nearly done", fed=5, limit=3),
        request("last token", fed=5, limit=2),
    ]
    propose_drafts(proposer, requests)
    known = [0, 1, 2, 3, 4, 7]
    assert proposer.asked == [("decodes", known, 3), ("nearly done", known, 1)]
    assert [each.drafts for each in requests] == [(0, 1, 2), (), (), (), (0,), ()]


@pytest.mark.parametrize(
    ("drafts", "sampled", "right"),
    [((), [5], 0), ((5, 6), [5, 6, 7], 2), ((5, 6), [5, 7, 8], 1), ((5, 6), [4, 6, 7], 0), ((), [], 0)],
)
def test_drafts_are_right_up_to_the_first_that_was_not_sampled(
    drafts: tuple[int, ...], sampled: list[int], right: int
) -> None:
    assert num_accepted(drafts, sampled) == right
