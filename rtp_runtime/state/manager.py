"""The one authority over state: grants blocks and slots to requests, lays out their tables for a step, takes them back.

It counts tokens and never sees one; it schedules nothing, and cached prefixes go only where a request lacks room.
The order of calls: `adopt` a request, then around each step `grow` its requests, `group_batches`, `begin_step`, run,
`end_step`, and for each request `truncate` if drafts were rejected, and `commit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm
from typing import Final

import numpy as np
import torch

from rtp_kernel.batch import GroupBatch, ModelState
from rtp_kernel.parallel import ParallelContext
from rtp_runtime.errors import StateError
from rtp_runtime.state.arena import plan_arena
from rtp_runtime.state.capacity import Capacity, GroupReport
from rtp_runtime.state.descriptors import StateDescriptors
from rtp_runtime.state.grouping import GroupSpec, group_states
from rtp_runtime.state.holding import Holding
from rtp_runtime.state.layout import block_batch, slot_batch
from rtp_runtime.state.memory import StateMemory
from rtp_runtime.state.pool import Reference
from rtp_runtime.state.prefix import PrefixCache
from rtp_runtime.state.requests import RequestState
from rtp_runtime.state.sharing import PrefixSharing
from rtp_runtime.state.tables import RequestId, StepLayout, StepRow

POISON: Final = 0xFF
"""Byte of which every float format makes a NaN, and every signed integer -1."""


class StateManager:
    """State of all requests of one engine.

    Args:
        descriptors: what the model declares.
        cache_dtype: dtype of states declared with "cache".
        block_size: tokens per block, or None for the smallest that the states allow.
        num_blocks: size by tokens: enough for `num_blocks` blocks (of the smallest block size) in every group at once,
            and for the slots of `max_requests` requests and `num_snapshots` snapshots.
        memory: size by bytes; exactly one of the two is given.
        max_requests: requests that are expected to have state at once; more are possible if memory allows.
        max_drafts: drafts that a request may have in one step.
        max_step_tokens: tokens of one request in one step, at most; bounds what a window holds (None: unbounded).
        depth: steps submitted before the oldest is collected, beyond that one.
        order: by state name, the physical order of its dimensions, where a chosen op wants not the logical one.
        prefixes: keep what requests have computed for later ones with the same beginning.
        prefix_memory: bytes that may be kept so; None: all that no request needs.

    Raises:
        StateError: a descriptor nobody implements, an impossible block size, or too little memory.
    """

    def __init__(
        self,
        descriptors: StateDescriptors,
        *,
        cache_dtype: torch.dtype,
        device: torch.device | str = "cpu",
        block_size: int | None = None,
        num_blocks: int | None = None,
        memory: int | None = None,
        max_requests: int,
        max_drafts: int = 0,
        max_step_tokens: int | None = None,
        depth: int = 0,
        num_snapshots: int = 0,
        parallel: ParallelContext | None = None,
        order: Mapping[str, Sequence[str]] | None = None,
        prefixes: bool = False,
        prefix_memory: int | None = None,
    ) -> None:
        if (num_blocks is None) == (memory is None):
            raise StateError(f"num_blocks is {num_blocks} and memory is {memory}; give either num_blocks or memory")
        dtype = str(cache_dtype).removeprefix("torch.")
        self.groups: tuple[GroupSpec, ...] = group_states(
            descriptors, cache_dtype=dtype, block_size=block_size, parallel=parallel, order=order
        )
        span = None if max_step_tokens is None else (2 * depth + 1) * max_step_tokens
        demand = Capacity.demand(self.groups, num_blocks, max_requests, max_drafts, span, num_snapshots)
        plan = plan_arena(self.groups, blocks=demand, memory=memory)
        self.capacity = Capacity(self.groups, plan, max_drafts, span)
        self.capacity.check()
        self.device = torch.device(device)
        self.memory = StateMemory(self.groups, plan, self.device, max_requests)
        self.arena, self._pools, self._tables = self.memory.arena, self.memory.pools, self.memory.tables
        self._steps = self.memory.steps
        self._num_layers = len(descriptors)
        self._requests: dict[RequestId, RequestState] = {}
        self._free_rows: list[int] = []
        reusable = bool(self.groups) and all(spec.reuse == "prefix" for spec in self.groups)
        self._sharing = PrefixSharing(self.memory, prefix_memory) if prefixes and reusable else None

    # What the engine binds once.

    def views(self) -> ModelState:
        """`views[layer][name]`: each state as a tensor of fixed address, [blocks, entries, *axes] or [slots, *axes]."""
        return self.memory.views(self._num_layers)

    # Questions of capacity.

    def max_tokens_per_request(self) -> int:
        """The longest request that can run when it is alone."""
        return self.capacity.max_tokens()

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens can ever run."""
        return self.capacity.fits(num_tokens)

    def explain(self, num_tokens: int) -> str:
        """What a request of so many tokens takes, by group, and what there is: for the message that refuses it."""
        return self.capacity.explain(num_tokens)

    def describe(self) -> tuple[GroupReport, ...]:
        """Each group: kind, block size and who forced it, bytes per block, states, capacity."""
        return self.capacity.report()

    @property
    def snapshot_unit(self) -> int:
        """Snapshots are taken after multiples of so many tokens: where blocks of all groups end."""
        return lcm(*(table.block_size for table in self._tables.values()))

    @property
    def prefixes(self) -> PrefixCache | None:
        """What is kept of earlier requests; None when nothing is, by choice or because a state forbids it."""
        return None if self._sharing is None else self._sharing.cache

    @property
    def num_waiting(self) -> int:
        """Blocks and slots that become free once the steps in flight have ended."""
        return self._steps.num_waiting

    # Growth and release of requests.

    def can_grow(self, request: RequestId, num_tokens: int, drafts: int = 0) -> bool:
        """Whether `num_tokens` more tokens of the request, `drafts` of them drafts, can be given a place now.

        Cached prefixes that nobody uses make way for them.
        """
        return self._make_room(self._needs(request, num_tokens, drafts))

    def grow(self, request: RequestId, num_tokens: int, drafts: int = 0) -> bool:
        """Give `num_tokens` more tokens of the request a place; a request not seen before is new.

        Returns False, and changes nothing of any request, when there is no room even without cached prefixes.
        """
        state = self._requests.get(request)
        if state is None or drafts or state.length + num_tokens > state.room:
            needs = self._needs(request, num_tokens, drafts)
            if not self._make_room(needs):
                return False
            state = state or self._add(request)
            for group, need in enumerate(needs):
                if need:
                    self._grant(state, group, self._pools[group].allocate(need))
            state.measure(self.groups)
        state.length += num_tokens
        if self._sharing is not None and state.share is not None and state.share.next_copy <= state.length:
            self._sharing.ask(state)
        return True

    def num_tokens(self, request: RequestId) -> int:
        """Tokens of the request that have a place; 0 for one that is not known."""
        state = self._requests.get(request)
        return 0 if state is None else state.length

    def truncate(self, request: RequestId, num_tokens: int) -> None:
        """Rewind the request to its first `num_tokens` tokens: rejected drafts, or growth that is not used after all.

        Raises:
            StateError: a slot of the request has passed there and left no copy.
        """
        state = self._requests[request]
        assert state.committed <= num_tokens <= state.length, (
            f"{request!r} cannot rewind to {num_tokens} tokens: {state}"
        )
        if num_tokens < state.submitted:
            for slots in state.slots.values():
                slots.rewind(num_tokens)
            state.submitted = num_tokens
        for group, table in self._tables.items():
            end = -(-num_tokens // table.block_size)
            if end < state.end[group]:
                self.memory.drop(group, table.take(state.row, end, state.end[group]), Reference.REQUEST)
                state.end[group] = end
        state.length = num_tokens
        state.measure(self.groups)

    def release(self, request: RequestId) -> None:
        """The request is done with its state. A second release, or one of an unknown request, changes nothing."""
        state = self._requests.pop(request, None)
        if state is None:
            return
        for group, table in self._tables.items():
            self.memory.drop(group, table.take(state.row, state.first[group], state.end[group]), Reference.REQUEST)
        for group, slots in state.slots.items():
            kept = [slot for slot in (slots.own, slots.source, *slots.candidates) if slot]
            self.memory.drop(group, kept, Reference.REQUEST)
        for holding in state.snapshots:
            self.let_go(holding)
        self._free_rows.append(state.row)

    # Reuse of prefixes.

    def adopt(self, request: RequestId, keys: Sequence[bytes], num_tokens: int, *, lookup: bool = True) -> int:
        """Begin a new request of `num_tokens` known tokens with the longest cached prefix of it; returns its tokens.

        What the request commits is kept for others, as far as `keys` (of its tokens, `prefixes.key_unit` each) go by
        then. At least one token is left to compute. With `lookup` false it starts from nothing.
        """
        if self._sharing is None:
            return 0
        match = self._sharing.match(keys, num_tokens if lookup else 0)
        if match.nodes:
            blocks, slots = self._sharing.cache.use(match.nodes)
            state = self._start(request, match.nodes[-1].end, blocks, slots)
        else:
            state = self._add(request)
        self._sharing.join(state, keys, num_tokens, match)
        return state.committed

    def clear_prefixes(self) -> None:
        """Forget all cached prefixes; running requests keep what they use."""
        if self._sharing is not None:
            self._sharing.cache.clear()

    # Around a step.

    def group_batches(
        self, rows: Sequence[StepRow], padded_requests: int | None = None, padded_tokens: int | None = None
    ) -> tuple[GroupBatch, ...]:
        """The step's tables, in the order of the rows; tensors are fresh, so that later calls do not reach them."""
        padded_tokens = sum(row.num_tokens for row in rows) if padded_tokens is None else padded_tokens
        layout = StepLayout.of(rows, len(rows) if padded_requests is None else padded_requests, padded_tokens)
        states = [self._requests[row.request] for row in rows]
        table_rows = np.array([state.row for state in states], np.int64)
        batches: list[GroupBatch] = []
        for spec in self.groups:
            if spec.is_slot:
                batches.append(slot_batch(spec, rows, states, layout, self.device))
            else:
                batches.append(block_batch(spec, self._tables[spec.index], table_rows, states, layout, self.device))
        return tuple(batches)

    def begin_step(self, rows: Sequence[StepRow]) -> int:
        """The step of these rows is submitted: what loses its owner is free after `end_step` with this ticket."""
        for row in rows:
            state = self._requests[row.request]
            end = row.start + row.num_tokens
            assert row.start == state.submitted, (
                f"request {row.request!r} goes on at {state.submitted}, not {row.start}"
            )
            assert end <= state.length, f"request {row.request!r} has grown to {state.length} tokens, not {end}"
            state.submitted = end
            for slots in state.slots.values():
                slots.kept_from, slots.kept = end - row.drafts, row.drafts
        return self._steps.begin()

    def end_step(self, ticket: int) -> None:
        """The step has been collected, or failed: it no longer touches memory. A second call changes nothing."""
        self._steps.end(ticket)

    def commit(self, request: RequestId, num_tokens: int) -> None:
        """The first `num_tokens` tokens of the request are computed, collected and final; unknown requests are ignored.

        After a release the id stands for a new request, to which no result of an older step may be committed.
        Snapshots up to there are complete, and blocks that no later query can see are let go.
        """
        state = self._requests.get(request)
        if state is None:
            return
        assert state.committed <= num_tokens <= state.submitted, (
            f"{num_tokens} tokens of {request!r} were not submitted"
        )
        state.committed = num_tokens
        if self._sharing is not None:
            self._sharing.publish(state)
        for holding in state.due_snapshots(num_tokens):
            if holding.lasting is None or self._sharing is None:
                self.memory.complete(state.row, holding)
            elif not self._sharing.deliver(state, holding):
                self.let_go(holding)
        for group, slots in state.slots.items():
            if slots.source and num_tokens > slots.source_at:
                self.memory.drop(group, [slots.source], Reference.REQUEST)
                slots.source = 0
        self.memory.pass_windows(state)

    # Snapshots and transfers.

    def snapshot(self, request: RequestId, num_tokens: int | None = None) -> Holding | None:
        """Keep the state after the request's first `num_tokens` tokens (default: those committed) as a cached prefix.

        `num_tokens` lies ahead of what has been submitted, and then the step that passes it leaves the copy and
        `commit` completes the snapshot; or it is what has been committed, with no step of the request in flight.
        Returns None when there is no slot for the copy.

        Raises:
            StateError: not at the end of blocks, or neither of these places.
        """
        state = self._requests[request]
        num_tokens = state.committed if num_tokens is None else num_tokens
        state.check_snapshot(request, num_tokens, self.snapshot_unit)
        slot_groups = list(state.slots)
        if not self._make_room([int(group in state.slots) for group in range(len(self.groups))]):
            return None
        slots = {group: self._pools[group].allocate(1, Reference.CACHE)[0] for group in slot_groups}
        holding = Holding(num_tokens, Reference.CACHE, slots=slots)
        if num_tokens > state.submitted:
            state.snapshots.append(holding)
            return holding
        for group, slot in slots.items():
            self.memory.copy_slot(group, state.slots[group].reading(num_tokens), slot)
        self.memory.complete(state.row, holding)
        return holding

    def restore(self, request: RequestId, holding: Holding) -> int:
        """Start a new request from a complete holding, whose blocks and slots it shares; returns the tokens it has."""
        assert holding.complete and not holding.released, "only what is computed, collected and kept can be restored"
        self._start(request, holding.num_tokens, holding.blocks, holding.slots)
        return holding.num_tokens

    def transfer(self, holding: Holding) -> Holding:
        """Keep what a complete holding keeps for a copy in flight, by references of the third kind."""
        assert holding.complete and not holding.released, "only what is computed, collected and kept can be sent"
        for group, (_, blocks) in holding.blocks.items():
            self._pools[group].take(blocks, Reference.TRANSFER)
        for group, slot in holding.slots.items():
            self._pools[group].take([slot], Reference.TRANSFER)
        return Holding(holding.num_tokens, Reference.TRANSFER, True, False, dict(holding.blocks), dict(holding.slots))

    def let_go(self, holding: Holding) -> None:
        """Give a holding's references back (eviction, or the end of a transfer); a second call changes nothing."""
        if holding.released:
            return
        holding.released = True
        for group, (_, blocks) in holding.blocks.items():
            self.memory.drop(group, blocks, holding.kind)
        for group, slot in holding.slots.items():
            self.memory.drop(group, [slot], holding.kind)

    def poison(self, byte: int = POISON) -> None:
        """Overwrite all memory that nobody keeps, for tests: whoever reads it is found out. Only between steps."""
        self.memory.poison(byte)

    # Behind these.

    def _add(self, request: RequestId) -> RequestState:
        assert request not in self._requests, f"request {request!r} has state already"
        row = self._free_rows.pop() if self._free_rows else len(self._requests)
        for table in self._tables.values():
            table.put(row, 0, ())
        state = self._requests[request] = RequestState.new(row, self.groups)
        return state

    def _start(
        self,
        request: RequestId,
        num_tokens: int,
        blocks: Mapping[int, tuple[int, Sequence[int]]],
        slots: Mapping[int, int],
    ) -> RequestState:
        """A new request whose first tokens have the state that these blocks and slots hold, which it shares."""
        state = self._add(request)
        for group, (first, ids) in blocks.items():
            self._pools[group].take(ids, Reference.REQUEST)
            self._tables[group].put(state.row, first, ids)
            state.first[group], state.end[group] = first, first + len(ids)
        for group, slot in slots.items():
            self._pools[group].take([slot], Reference.REQUEST)
            state.slots[group].source, state.slots[group].source_at = slot, num_tokens
        state.length = state.submitted = state.committed = num_tokens
        return state

    def _needs(self, request: RequestId, num_tokens: int, drafts: int) -> list[int]:
        """Blocks and slots, by group, that the request lacks for `num_tokens` more tokens."""
        state = self._requests.get(request) or RequestState.new(-1, self.groups)
        return [state.lacks(spec, state.length + num_tokens, drafts) for spec in self.groups]

    def _make_room(self, needs: Sequence[int]) -> bool:
        if self._sharing is None:
            return self.memory.available(needs)
        return self._sharing.make_room(needs, self._requests.values())

    def _grant(self, state: RequestState, group: int, blocks: list[int]) -> None:
        slots = state.slots.get(group)
        if slots is None:
            self._tables[group].put(state.row, state.end[group], blocks)
            state.end[group] += len(blocks)
            return
        if not slots.own:
            slots.own = blocks.pop()
        slots.candidates += blocks
