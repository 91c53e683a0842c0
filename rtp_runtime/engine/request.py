"""One request: what was asked, what was planned, what came back. Holds counts and ids, no tensors but kept logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rtp_runtime.engine.outputs import FinishReason, TokenLogprobs
from rtp_runtime.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from rtp_runtime.engine.text_stream import TextStream


class Request:
    """A request and its progress.

    `num_tokens` counts the tokens that are to be fed, sampled ones included whether or not the host knows them yet;
    `num_computed` those that a submitted step feeds. `ids` are the sampled tokens that were collected.
    """

    __slots__ = (
        "arrival",
        "drafts",
        "from_table",
        "generation",
        "ids",
        "in_flight",
        "limit",
        "logits",
        "logprobs",
        "num_computed",
        "num_outputs",
        "num_tokens",
        "params",
        "penalty_slot",
        "prompt",
        "prompt_ids",
        "prompt_logprobs",
        "reason",
        "request_id",
        "return_logits",
        "row",
        "seed",
        "stop_ids",
        "stop_reason",
        "text",
    )

    def __init__(
        self,
        request_id: str,
        prompt_ids: NDArray[np.int64],
        params: SamplingParams,
        *,
        arrival: int,
        limit: int,
        seed: int,
        stop_ids: frozenset[int] = frozenset(),
        prompt: str | None = None,
        text: TextStream | None = None,
        return_logits: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.params = params
        self.arrival = arrival
        self.limit = limit
        """Most output tokens."""
        self.seed = seed
        self.stop_ids = stop_ids
        """Ids that end the request: end-of-sequence ids unless ignored, and the caller's."""
        self.text = text
        self.return_logits = return_logits

        self.num_tokens = len(prompt_ids)
        self.num_computed = 0
        self.num_outputs = 0
        """Tokens that submitted steps sample."""
        self.in_flight = 0
        """Submitted steps that were not collected."""
        self.generation = 0
        """Rises when the state is given up, so that a late step's result is not committed to new state."""
        self.from_table = False
        """The next token to feed is the one that a submitted step left in the device table."""
        self.drafts: tuple[int, ...] = ()
        """Guesses for the tokens after the next one to feed; only the next step may use them."""
        self.row = -1
        """Row of the device tables while the request runs."""
        self.penalty_slot = -1

        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.logits: list[Tensor] = []
        self.reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    def settle(self, num_outputs: int, num_computed: int | None) -> None:
        """Count a collected step with drafts: it sampled so many tokens, and `num_computed` are fed (None: none, since
        the state was given up meanwhile)."""
        self.num_outputs += num_outputs
        self.num_tokens = self.num_prompt + min(self.num_outputs, self.limit - 1)
        if num_computed is not None:
            self.num_computed = num_computed

    def host_ids(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens `start` to `stop`, prompt and collected output."""
        if stop <= len(self.prompt_ids):
            return self.prompt_ids[start:stop]
        assert stop <= len(self.prompt_ids) + len(self.ids), "the host does not know these tokens yet"
        return np.concatenate((self.prompt_ids, np.asarray(self.ids, dtype=np.int64)))[start:stop]
