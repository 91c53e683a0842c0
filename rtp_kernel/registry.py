"""Which implementations of an op exist, which one is taken for a context, and why.

An op is known by name. Its plain-torch reference is always the last candidate, so that everything runs everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class OpContext:
    """What an implementation may decide on. Grows only by fields with defaults."""

    device: str
    dtype: torch.dtype
    weight_format: str = "plain"
    shapes: Mapping[str, int] = field(default_factory=dict)
    """Local sizes by name: heads, kv heads, head dim, in, out, experts …"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the component asks of the op: window, sinks, soft cap, activation …"""
    block_size: int = 0
    regime: str = "any"
    captured: bool = False
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Support:
    """An answer of `supports`: yes, or no with reasons."""

    ok: bool
    reasons: tuple[str, ...] = ()


class Implementation(Protocol):
    """One way to compute an op."""

    name: str

    def supports(self, context: OpContext) -> Support: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


OpFunction = Callable[..., Any]
