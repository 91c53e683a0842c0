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
    from rtp_runtime.state.keys import ContentKeys


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
        "keys",
        "limit",
        "logits",
        "logprobs",
        "num_cached_tokens",
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
        keys: ContentKeys | None = None,
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
        self.keys = keys
        """Content keys of the tokens that the host knows; None: it shares no prefixes."""

        self.num_tokens = len(prompt_ids)
        self.num_computed = 0
        self.num_outputs = 0
        """Tokens that submitted steps sample."""
        self.in_flight = 0
        """Submitted steps that were not collected."""
        self.num_cached_tokens = 0
        """Tokens of the prompt that it did not have to compute when it was first admitted."""
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

    @property
    def may_skip(self) -> bool:
        """Whether tokens of the prompt need no output of their own."""
        return not self.return_logits and self.params.prompt_logprobs is None

    def extend_keys(self, stop: int) -> None:
        """Give keys to the tokens up to `stop`, as far as they fill units."""
        if self.keys is not None and stop - self.keys.num_tokens >= self.keys.unit:
            self.keys.extend(self.host_ids(self.keys.num_tokens, stop))

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
        if start >= self.num_prompt:
            return np.array(self.ids[start - self.num_prompt : stop - self.num_prompt], dtype=np.int64)
        return np.concatenate((self.prompt_ids, np.asarray(self.ids, dtype=np.int64)))[start:stop]
