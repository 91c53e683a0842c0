"""The limits an engine runs under. Resolved against a model by the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rtp_runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits and policies of one engine.

    Raises:
        UsageError: a value of the wrong type or outside its range.
    """

    max_num_seqs: int = 32
    """Requests that run at once; more wait."""
    max_num_batched_tokens: int = 2048
    """Token rows of one step: decodes first, prefill chunks in what they leave."""
    max_chunk_tokens: int | None = None
    """Longest prefill chunk of one request; None: the whole budget."""
    max_model_len: int | None = None
    """Longest request, prompt and output together; None: the model's context, or what the state has room for."""
    block_size: int | None = None
    """Tokens per block; None: the smallest that the state and the chosen kernels allow."""
    num_blocks: int | None = None
    memory: int | None = None
    """Bytes for state; None with `num_blocks` None: enough for the limits above, at most a third of the free memory."""
    depth: int = 0
    """Steps submitted ahead of the one being collected."""
    seed: int | None = None
    """Where seeds of requests without one come from; None: entropy."""
    deterministic: bool = False
    """Only implementations whose result for a row is independent of its company."""
    prefix_caching: bool = True
    """Start a request from what earlier ones have computed of the same beginning. Requests that ask for an output at
    every position of the prompt compute them all."""
    prefix_cache_memory: int | None = None
    """Bytes of the state's memory that may be kept for requests to come; None: all that no request needs."""
    state_policy: str | None = None
    """Name under which a plugin has registered another way to keep the model's state; None: the model's own."""

    def __post_init__(self) -> None:
        _check("max_num_seqs", self.max_num_seqs, 1)
        _check("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _check("max_chunk_tokens", self.max_chunk_tokens, 1, optional=True)
        _check("max_model_len", self.max_model_len, 1, optional=True)
        _check("block_size", self.block_size, 1, optional=True)
        _check("num_blocks", self.num_blocks, 1, optional=True)
        _check("memory", self.memory, 1, optional=True)
        _check("depth", self.depth, 0)
        _check("seed", self.seed, 0, optional=True)
        _check("prefix_cache_memory", self.prefix_cache_memory, 1, optional=True)
        for name in ("deterministic", "prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}={getattr(self, name)!r}: give True or False")
        if self.state_policy is not None and not isinstance(self.state_policy, str):
            raise UsageError(f"state_policy={self.state_policy!r}: give a name or None")
        if self.depth > 2:
            raise UsageError(f"depth={self.depth} is out of range: give 0, 1 or 2")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} cannot hold one token of each of "
                f"max_num_seqs={self.max_num_seqs} requests: raise it or lower max_num_seqs"
            )


def _check(name: str, value: Any, low: int, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(
            f"{name}={value!r} is a {type(value).__name__}: give an integer{' or None' if optional else ''}"
        )
    if value < low:
        raise UsageError(f"{name}={value} is out of range: give {low} or more")
