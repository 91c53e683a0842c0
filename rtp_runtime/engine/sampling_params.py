"""What a caller asks of one request's continuation, validated. Knows no torch and no model.

A value that depends on the model (a stop id outside the vocabulary) is judged when the request is added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rtp_runtime.errors import UsageError

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing by it would only overflow."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next tokens are chosen, and when to stop.

    Logits pass, in this order: `min_tokens` (stop ids masked), penalties, temperature, `top_k`, `top_p`, `min_p`.
    Log probabilities are those of the unmodified logits.

    Raises:
        UsageError: a value of the wrong type or outside its range.
    """

    temperature: float = 0.0
    """0 is greedy (the lowest id on ties)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output, as in transformers; the other two count output tokens only, as OpenAI defines them."""
    seed: int | None = None
    """None: drawn by the engine when the request is added."""
    max_tokens: int | None = 16
    """None: up to the end of the context."""
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many of the most likely tokens are reported at each output position, besides the chosen one."""
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    """Only requests of the same salt share cached prefixes, so that nobody learns by timing what others have asked."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _strings("stop", stop))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        _number("temperature", self.temperature, 0.0, 1000.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 1000.0, open_low=True)
        _integer("top_k", self.top_k, -1)
        _integer("seed", self.seed, 0, 2**63 - 1, optional=True)
        _integer("max_tokens", self.max_tokens, 1, optional=True)
        _integer("min_tokens", self.min_tokens, 0)
        _integer("logprobs", self.logprobs, 0, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, optional=True)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}={getattr(self, name)!r}: give True or False")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise UsageError(f"cache_salt={self.cache_salt!r} is a {type(self.cache_salt).__name__}: give a string")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}: lower it or raise max_tokens"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{name}={value!r} is a {type(value).__name__}: give a number")
    inside = low < value <= high if open_low else low <= value <= high
    if math.isnan(value) or not inside:
        above = "above" if open_low else "from"
        raise UsageError(f"{name}={value!r} is out of range: give a number {above} {low:g} up to {high:g}")


def _integer(name: str, value: Any, low: int, high: int | None = None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(
            f"{name}={value!r} is a {type(value).__name__}: give an integer{' or None' if optional else ''}"
        )
    if value < low or (high is not None and value > high):
        allowed = f"{low} or more" if high is None else f"{low} to {high}"
        raise UsageError(f"{name}={value} is out of range: give {allowed}")


def _strings(name: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, Sequence) or not all(isinstance(value, str) for value in values):
        raise UsageError(f"{name}={values!r}: give a string or a list of strings")
    if "" in values:
        raise UsageError(f"{name}={list(values)!r} has an empty string, which every text contains: leave it out")
    return tuple(values)


def _ids(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise UsageError(f"{name}={values!r}: give a list of token ids")
    for value in values:
        _integer(name, value, 0)
    return tuple(values)
