"""From per-layer descriptors to groups: which states share a block table, how large a block is, what lies where in it.

Knows no memory and no requests, and needs no torch: `rtp inspect` can print groups before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod
from types import MappingProxyType
from typing import Final, NamedTuple, get_args

from rtp_kernel.parallel import ParallelContext
from rtp_runtime.errors import StateError
from rtp_runtime.state.descriptors import (
    CompressedState,
    PagedState,
    Reuse,
    SlotState,
    Snapshots,
    StateDescriptor,
    StateDescriptors,
    WindowState,
)

DEFAULT_BLOCK_SIZE: Final = 16
STATE_ALIGNMENT: Final = 64
"""Bytes: every state of every block starts on a cache line, which is also enough for any dtype."""

KINDS: Final[Mapping[type[StateDescriptor], str]] = MappingProxyType(
    {PagedState: "paged", CompressedState: "compressed", WindowState: "window", SlotState: "slot"}
)
DTYPE_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
        "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    }
)  # fmt: skip

Named = tuple[int, str, StateDescriptor]
"""(layer, name, descriptor)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedState:
    """One state of one layer inside the blocks (slots) of its group."""

    layer: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of one block: (entries, *axes); of one slot: (*axes)."""
    strides: tuple[int, ...]
    """In elements, one for each dimension of `shape`."""
    offset: int
    """Bytes from the start of the block."""
    tokens_per_entry: int = 1
    initial: float | int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Every state that lives by one rule: one block table (or one slot per request) serves them all."""

    index: int
    kind: str
    block_size: int
    """Tokens per block; 0 for slots."""
    forced_by: str
    """Who decided the block size, in words."""
    block_bytes: int
    states: tuple[PlacedState, ...]
    window: int = 0
    """Tokens that a query sees, itself included; 0 = all."""
    reuse: Reuse = "prefix"
    capacity: float = 1.0
    retention: Snapshots | None = None
    """Slots: where copies are kept."""

    @property
    def is_slot(self) -> bool:
        return self.kind == "slot"

    @property
    def tokens_per_entry(self) -> tuple[int, ...]:
        """The different numbers of tokens per entry among the group's states."""
        return tuple(sorted({state.tokens_per_entry for state in self.states}))


class _Policy(NamedTuple):
    """What states must agree on, besides their block size, to live by one rule."""

    window: int
    reuse: Reuse
    capacity: float
    retention: Snapshots | None

    @classmethod
    def of(cls, state: StateDescriptor) -> _Policy:
        window = state.window if isinstance(state, WindowState) else 0
        return cls(window, state.reuse, state.capacity, state.retention if isinstance(state, SlotState) else None)


def group_states(
    descriptors: StateDescriptors,
    *,
    cache_dtype: str,
    block_size: int | None = None,
    parallel: ParallelContext | None = None,
    order: Mapping[str, Sequence[str]] | None = None,
) -> tuple[GroupSpec, ...]:
    """Group the states of a model, in the order in which their rules first appear.

    Paged and compressed states share a group when they come to the same block size. `order` gives, by state name, the
    physical order of its dimensions (axis names and "entries") where the chosen op wants another than the logical one.

    Raises:
        StateError: a descriptor nobody implements, a bad number, or a block size that a state cannot have.
    """
    families: dict[tuple[str, _Policy], list[Named]] = {}
    for layer, name, state in descriptors.named():
        _check(layer, name, state)
        families.setdefault((KINDS[type(state)], _Policy.of(state)), []).append((layer, name, state))
    merged: dict[tuple[str, _Policy, int], tuple[str, str, list[Named]]] = {}
    for (kind, policy), members in families.items():
        size, forced_by = (0, "") if kind == "slot" else choose_block_size(members, block_size)
        allocated = "per token" if kind in ("paged", "compressed") else kind
        first_kind, reason, states = merged.get((allocated, policy, size), (kind, forced_by, []))
        kind = "paged" if "paged" in (kind, first_kind) else kind
        reason = forced_by if reason == "default" else reason
        merged[allocated, policy, size] = (kind, reason, states + members)
    parallel = parallel or ParallelContext()
    return tuple(
        _place(index, kind, size, policy, reason, states, cache_dtype, parallel, order or {})
        for index, ((_, policy, size), (kind, reason, states)) in enumerate(merged.items())
    )


def choose_block_size(members: Sequence[Named], asked: int | None) -> tuple[int, str]:
    """The tokens per block of states that share one, and who forced it.

    Raises:
        StateError: `asked` is not a multiple of what a state needs.
    """
    needed = lcm(*(_multiple(state) for _, _, state in members))
    if asked is None:
        size = -(-DEFAULT_BLOCK_SIZE // needed) * needed
        forcing = next((named for named in members if DEFAULT_BLOCK_SIZE % _multiple(named[2])), None)
        return size, "default" if forcing is None else _reason(*forcing)
    for named in members:
        if asked < 1 or asked % _multiple(named[2]):
            raise StateError(
                f"block size {asked} does not suit {_reason(*named)}; a multiple of {needed} does: "
                f"ask for block_size={-(-max(asked, 1) // needed) * needed}, or leave it out"
            )
    return asked, f"asked for (block_size={asked})"


def _multiple(state: StateDescriptor) -> int:
    """The number of tokens that a block of this state must hold a multiple of."""
    if isinstance(state, CompressedState):
        return lcm(state.alignment, state.tokens_per_entry)
    return state.alignment if isinstance(state, PagedState | WindowState) else 1


def _reason(layer: int, name: str, state: StateDescriptor) -> str:
    if isinstance(state, CompressedState):
        entry = f"one entry for {state.tokens_per_entry} tokens"
        return f"state {name!r} of layer {layer} ({entry}, aligned to {state.alignment})"
    return f"state {name!r} of layer {layer} (aligned to {_multiple(state)} tokens)"


def _check(layer: int, name: str, state: StateDescriptor) -> None:
    where = f"state {name!r} of layer {layer}"
    if type(state) not in KINDS:
        known = ", ".join(kind.__name__ for kind in KINDS)
        raise StateError(
            f"{where} is a {type(state).__name__}, a kind that this runtime does not implement; it knows {known}. "
            "Declare one of these, or install a runtime that supports the kind"
        )
    numbers = {f"axis {axis!r}": size for axis, size in state.axes.items()}
    for field in ("alignment", "tokens_per_entry", "window"):
        if hasattr(state, field):
            numbers[field] = getattr(state, field)
    for what, number in numbers.items():
        if number < 1:
            raise StateError(f"{where} has {what} = {number}; it must be at least 1: correct its descriptor")
    if state.reuse not in get_args(Reuse):
        raise StateError(f"{where} has reuse {state.reuse!r}; known are {', '.join(get_args(Reuse))}")
    if not 0 <= state.capacity <= 1:
        raise StateError(f"{where} has capacity {state.capacity}; it is a share of memory: give a number from 0 to 1")
    if isinstance(state, SlotState) and state.retention.every < 0:
        raise StateError(f"{where} keeps snapshots every {state.retention.every} tokens; give 0 (none) or more")
    if state.dtype != "cache" and state.dtype not in DTYPE_BYTES:
        raise StateError(f"{where} has dtype {state.dtype!r}; known are 'cache' and {', '.join(DTYPE_BYTES)}")
    if state.shard is not None and state.shard not in state.axes:
        raise StateError(f"{where} is sharded on {state.shard!r}, which is none of its axes {list(state.axes)}")


def _place(
    index: int,
    kind: str,
    size: int,
    policy: _Policy,
    reason: str,
    members: Sequence[Named],
    cache_dtype: str,
    parallel: ParallelContext,
    order: Mapping[str, Sequence[str]],
) -> GroupSpec:
    """Lay the states of one group behind one another: layer by layer, each contiguous within the block."""
    offset = 0
    placed: list[PlacedState] = []
    for layer, name, state in sorted(members, key=lambda named: named[0]):
        tokens_per_entry = state.tokens_per_entry if isinstance(state, CompressedState) else 1
        dims = _local_axes(layer, name, state, parallel)
        if kind != "slot":
            dims = {"entries": size // tokens_per_entry} | dims
        dtype = cache_dtype if state.dtype == "cache" else state.dtype
        initial = state.initial if isinstance(state, SlotState) else 0
        shape, strides = tuple(dims.values()), _strides(name, dims, order.get(name, ()))
        placed.append(
            PlacedState(
                layer=layer, name=name, dtype=dtype, shape=shape, strides=strides,
                offset=offset, tokens_per_entry=tokens_per_entry, initial=initial,
            )
        )  # fmt: skip
        offset += _align(prod(shape) * DTYPE_BYTES[dtype])
    return GroupSpec(
        index=index,
        kind=kind,
        block_size=size,
        forced_by=reason,
        block_bytes=offset,
        states=tuple(placed),
        **policy._asdict(),
    )


def _local_axes(layer: int, name: str, state: StateDescriptor, parallel: ParallelContext) -> dict[str, int]:
    """The axes of one rank: the sharded one divided, or held once by each when there are fewer than ranks."""
    axes = dict(state.axes)
    if state.shard is None:
        return axes
    size = axes[state.shard]
    if size % parallel.size and parallel.size % size:
        raise StateError(
            f"axis {state.shard!r} of state {name!r} of layer {layer} has {size} places, which {parallel.size} ranks "
            "can neither divide nor repeat; use a number of ranks that divides it or is a multiple of it"
        )
    axes[state.shard] = max(size // parallel.size, 1)
    return axes


def _strides(name: str, dims: Mapping[str, int], order: Sequence[str]) -> tuple[int, ...]:
    """Element strides of `dims` when they lie in memory in the order given (default: as listed)."""
    physical = list(order) or list(dims)
    if sorted(physical) != sorted(dims):
        raise StateError(
            f"the physical order {physical} of state {name!r} does not name its dimensions {list(dims)} once each"
        )
    strides: dict[str, int] = {}
    step = 1
    for dim in reversed(physical):
        strides[dim] = step
        step *= dims[dim]
    return tuple(strides[dim] for dim in dims)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT
