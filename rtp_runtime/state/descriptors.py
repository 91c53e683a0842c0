"""What a model says of its state, per layer: logical, printable, and without torch.

A descriptor never says bytes, strides, ranks or block size; the runtime computes those. Its policies say what other
requests may have of it: `reuse` whether, `retention` what is kept for them, `capacity` how much memory that may take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Reuse = Literal["prefix", "none"]


@dataclass(frozen=True, kw_only=True)
class Snapshots:
    """Where copies of a request's slot state are kept for requests to come; each place is the end of a block.

    A copy is large and serves one place only, so they are few: at every place they would crowd out what they go with.
    """

    prompt_end: bool = True
    """The last place that leaves a token of the prompt to compute: for the same prompt again."""
    branch: bool = True
    """Where a prompt leaves what is cached further than it can be reused: for the next one that shares so much."""
    latest: bool = True
    """The last place that a request passed, moving along with it: for the next turn of a conversation."""
    every: int = 0
    """Besides, places so many tokens apart (rounded up to ends of blocks); 0: none."""


@dataclass(frozen=True, kw_only=True)
class StateDescriptor:
    """One named state of one layer."""

    axes: Mapping[str, int]
    """Named axes of one entry (or slot), in order, e.g. `{"kv": 2, "kv heads": 8, "head dim": 128}`."""
    shard: str | None = None
    """The axis that tensor parallelism splits; None = every rank holds all of it."""
    dtype: str = "cache"
    """A dtype name, or "cache": the engine's cache dtype."""
    reuse: Reuse = "prefix"
    """Whether a request may start from another's. What is reused of a model is what all its states can supply, so that
    one state with "none" keeps the whole model from it."""
    capacity: float = 1.0
    """Share of the memory for state that may be kept for requests to come."""


@dataclass(frozen=True, kw_only=True)
class PagedState(StateDescriptor):
    """One entry per token, in blocks; reusable per block; rewinds by truncation."""

    alignment: int = 1
    """Tokens that a block must hold a multiple of."""


@dataclass(frozen=True, kw_only=True)
class CompressedState(StateDescriptor):
    """One entry per `tokens_per_entry` tokens, written by the token that closes it; its buffer is a `SlotState`."""

    tokens_per_entry: int
    alignment: int = 1


@dataclass(frozen=True, kw_only=True)
class WindowState(StateDescriptor):
    """One entry per token, of which a query sees the last `window` (itself included); blocks behind it are freed."""

    window: int
    alignment: int = 1


@dataclass(frozen=True, kw_only=True)
class SlotState(StateDescriptor):
    """One entry per request, rewritten as tokens pass; reusable from snapshots only; rewinds to a candidate slot."""

    initial: float | int = 0
    """What a new request reads: the value of every element of the null slot."""
    capacity: float = 0.5
    retention: Snapshots = Snapshots()


class StateDescriptors(Sequence[Mapping[str, StateDescriptor]]):
    """The states of every layer: `descriptors[layer][name]`."""

    def __init__(self, layers: Sequence[Mapping[str, StateDescriptor]]) -> None:
        self._layers = tuple(dict(layer) for layer in layers)

    def __getitem__(self, layer: int) -> Mapping[str, StateDescriptor]:  # type: ignore[override]
        return self._layers[layer]

    def __len__(self) -> int:
        return len(self._layers)

    def named(self) -> Iterator[tuple[int, str, StateDescriptor]]:
        """Every state as (layer, name, descriptor), in layer order."""
        for layer, states in enumerate(self._layers):
            for name, state in states.items():
                yield layer, name, state
