"""The tensors and integers of one forward step, as kernels, components and the runtime all speak of them.

`T` is the padded number of tokens of the step, `R` the padded number of requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rtp_kernel.parallel import ParallelContext

NULL_BLOCK = 0
"""Block (and slot) 0 of every group: padding rows point at it, no request ever owns it, and it holds the declared
initial value of each state (0 for keys and values: finite, whoever loads it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBatch:
    """One state group's share of a step: where its states are read and written.

    Paged, compressed and window groups fill the block fields; slot groups fill the slot fields.
    """

    block_size: int = 0
    """Tokens per block (host)."""
    block_table: Tensor | None = None
    """[R, blocks] int32: block ids in token order; `NULL_BLOCK` where nothing is held (behind a window, past the
    end)."""
    slot_mapping: Mapping[int, Tensor] = field(default_factory=dict)
    """tokens per entry -> [T] int64: `block * entries_per_block + offset` of the entry that this token writes or, for
    r > 1 tokens per entry, closes; -1 where it writes nothing."""
    first_valid: Tensor | None = None
    """Window groups: [R] int64, the first token index whose entry is still held."""
    read: Tensor | None = None
    """Slot groups: [R] int64, the slot that holds each request's state before this step (the null slot for a new
    request)."""
    write: Tensor | None = None
    """Slot groups: [R] int64, the slot that receives the state after the request's last token of this step; for padding
    requests a scratch slot, since the null slot is never written."""
    snapshots: Tensor | None = None
    """Slot groups: [N, 2] int64 rows (token row, slot): leave a copy of the state after that token in that slot. Draft
    candidates are snapshots too. Rows of -1 are padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """A packed step: decode requests first (one token each, or 1 + drafts), then prefill chunks.

    Padding rows have index -1 and belong to no request. A batch of zero real tokens is legal.
    """

    input_ids: Tensor
    """[T] int64."""
    index: Tensor
    """[T] int64: the token's place in its request; decides causality, windows, compression and cache slots. -1 =
    padding."""
    positions: Tensor
    """[T] or [3, T] int64: for rotary embedding only."""
    request: Tensor
    """[T] int64: the token's row among the requests (0 for padding, whose index is -1)."""
    query_start: Tensor
    """[R + 1] int32: first token row of each request."""
    seq_lens: Tensor
    """[R] int32: tokens of the request that have state once this step is done (0 for padding requests)."""
    groups: tuple[GroupBatch, ...]
    num_decodes: int = 0
    """Requests of the decode part (host)."""
    num_decode_tokens: int = 0
    """Token rows of the decode part (host); equal to `num_decodes` unless drafts are verified."""
    query_lens: tuple[int, ...] = ()
    """New tokens of each request (host)."""
    kv_lens: tuple[int, ...] = ()
    """`seq_lens` as host integers."""
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Declared inputs beyond ids and positions, by name."""

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_requests(self) -> int:
        return len(self.query_lens)


@dataclass(frozen=True, slots=True)
class StateView:
    """One layer's state, bound once at start-up.

    `data` is logical whatever the physical order of its strides: [blocks, entries, *axes] for block kinds,
    [slots, *axes] for slot kinds. Only the block (slot) axis may have a stride larger than its extent.
    """

    data: Tensor
    group: int
    """Index into `ForwardBatch.groups`."""
    tokens_per_entry: int = 1


ModelState = Sequence[Mapping[str, StateView]]
"""`state[layer][name]`; a model fetches its views once per layer, in layer order."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """A forward's result when somebody asked, at load, for more than the last hidden state."""

    out: Tensor
    taps: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What a model needs to know while its modules are constructed (on the meta device)."""

    dtype: torch.dtype
    parallel: ParallelContext = field(default_factory=ParallelContext)
    taps: frozenset[str] = frozenset()
