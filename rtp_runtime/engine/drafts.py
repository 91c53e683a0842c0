"""Speculation: who guesses the tokens that follow, for whom, and how many guesses turned out right.

A guess is right when the model samples that very token there: guesses change nothing of what a request receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from rtp_runtime.engine.request import Request


class DraftProposer(Protocol):
    """Guesses a request's next tokens from those it has."""

    @property
    def max_drafts(self) -> int:
        """Most guesses for one request in one step."""
        ...

    def propose(self, request_id: str, token_ids: Sequence[int], limit: int) -> Sequence[int]:
        """At most `limit` ids that may follow `token_ids`, the request's prompt and output; none is fine."""
        ...


def propose_drafts(proposer: DraftProposer, requests: Iterable[Request]) -> None:
    """Ask for each request that feeds one token next, and whose tokens the host knows."""
    for request in requests:
        # Penalties count the tokens before a row, which a guess is not until it is accepted.
        if request.in_flight or request.num_tokens - request.num_computed != 1 or request.params.penalised:
            continue
        limit = min(proposer.max_drafts, request.limit - request.num_outputs - 1)
        if limit > 0:
            known = [*request.prompt_ids.tolist(), *request.ids]
            request.drafts = tuple(proposer.propose(request.request_id, known, limit))
            assert len(request.drafts) <= limit, f"{len(request.drafts)} drafts were proposed, {limit} asked for"


def num_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many drafts, from the first on, are what the model sampled in their place."""
    wrong = (place for place, (draft, token) in enumerate(zip(drafts, sampled, strict=False)) if draft != token)
    return next(wrong, len(drafts))
