"""What an engine hands back: each step's news of a request, and the whole of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


class Logprob(NamedTuple):
    """One token's log probability under the unmodified logits, and its rank (1 = most likely)."""

    logprob: float
    rank: int


TokenLogprobs = Mapping[int, Logprob]
"""token id -> log probability: the chosen token (or the prompt's own), then the most likely ones."""


@dataclass(slots=True, kw_only=True)
class StepOutput:
    """What one step added to one request."""

    request_id: str
    token_ids: list[int]
    text: str | None
    """Text that is now certain; None without a tokenizer."""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def after(self, earlier: StepOutput | None) -> StepOutput:
        """This news and earlier news of the same request as one."""
        if earlier is None:
            return self
        both = StepOutput(
            request_id=self.request_id,
            token_ids=earlier.token_ids + self.token_ids,
            text=None if self.text is None else (earlier.text or "") + self.text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        if self.logprobs is not None:
            both.logprobs = (earlier.logprobs or []) + self.logprobs
        return both


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request so far; finished once `finish_reason` is set."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    """New tokens only; the one that stopped the request is the last."""
    text: str | None
    """None without a tokenizer."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop id or stop string that was met; None for an end-of-sequence token."""
    logprobs: list[TokenLogprobs] | None = None
    """One mapping per token of `token_ids`."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One mapping per prompt token; None for the first, which nothing predicts."""
    logits: Tensor | None = None
    """[tokens that were fed, vocabulary] float32, when the request asked for them."""
    new_token_ids: list[int] = field(default_factory=list)
    """What the latest step added, for streams."""
    new_text: str | None = None
    num_cached_tokens: int = 0
    """Tokens of the prompt that were not computed, since an earlier request had."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine has done since it was made, and what it keeps now."""

    num_preemptions: int
    prefix_lookups: int
    """Requests that were looked up among cached prefixes; one that is preempted is looked up anew."""
    prefix_hits: int
    """Of these, those that started from one."""
    lookup_tokens: int
    """Tokens that the lookups asked for."""
    cached_tokens: int
    """Of these, those that were not computed again."""
    prefix_evictions: int
    """Cached stretches, and copies of slots, that made way."""
    prefix_bytes: int
    """Bytes of state that cached prefixes refer to now, those in use by running requests included."""
