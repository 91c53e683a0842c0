"""Any sequence of calls: what a request wrote is what it reads, whoever came and went meanwhile, and all comes back.

Every token writes a value of its own through the tables, at once and again as late as a step in flight may, and free
memory is poisoned when no step is in flight. A block with two owners, or one free too early, shows as a wrong value.
With prefixes, requests also begin with what others have published, and whatever is cached holds what its key says.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rtp_kernel.batch import GroupBatch
from rtp_runtime.state.descriptors import CompressedState, PagedState, SlotState, StateDescriptors, WindowState
from rtp_runtime.state.holding import Holding
from rtp_runtime.state.keys import ContentKeys
from rtp_runtime.state.manager import StateManager
from rtp_runtime.state.pool import Reference
from rtp_runtime.state.prefix import Node
from rtp_runtime.state.tables import StepRow

WINDOW, RATIO, BLOCK, DRAFTS = 11, 4, 8, 3
INT = {"axes": {"value": 1}, "dtype": "int64"}
DESCRIPTORS = StateDescriptors(
    [
        {"paged": PagedState(**INT), "wide": PagedState(axes={"value": 7}, dtype="int64")},  # type: ignore[arg-type]
        {"window": WindowState(**INT, window=WINDOW)},  # type: ignore[arg-type]
        {"closed": CompressedState(**INT, tokens_per_entry=RATIO)},  # type: ignore[arg-type]
        {"slot": SlotState(axes={"value": 40}, dtype="int64", initial=-5)},
    ]
)


def folded(tokens: list[int]) -> int:
    """What a slot holds after these tokens."""
    value = -5
    for token in tokens:
        value = (value * 31 + token) % (2**31)
    return value


@dataclass
class Flight:
    ticket: int
    rows: list[StepRow]
    lives: list[int]
    owners: dict[tuple[int, int], int]
    """(group, block or slot that is written) -> life of the request"""
    writes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """(rows of a state, places, values)"""


class Machine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(5, 14), prefixes=st.sampled_from([True, True, False]))
    def start(self, blocks: int, prefixes: bool) -> None:
        self.manager = StateManager(
            DESCRIPTORS, cache_dtype=torch.float32, block_size=BLOCK, num_blocks=blocks,
            max_requests=2, max_drafts=DRAFTS, num_snapshots=2, prefixes=prefixes,
        )  # fmt: skip
        self.data = {name: view for layer in self.manager.views() for name, view in layer.items()}
        self.tokens: dict[int, list[int]] = {}
        self.lives: dict[int, int] = {}
        self.flights: deque[Flight] = deque()
        self.holdings: list[tuple[Holding, list[int]]] = []
        self.next_token = self.next_life = 0
        self.known: dict[int, list[int]] = {}
        """Tokens that a request must feed before it makes up new ones."""
        self.keys: dict[int, ContentKeys] = {}
        self.content: dict[bytes, list[int]] = {}
        self.histories: list[list[int]] = []

    def group(self, batches: tuple[GroupBatch, ...], name: str) -> GroupBatch:
        return batches[self.data[name].group]

    def alive(self, row: StepRow, life: int) -> bool:
        return self.lives.get(int(row.request)) == life

    # Rules

    @rule(
        shares=st.lists(
            st.tuples(st.integers(0, 3), st.integers(1, 13), st.integers(0, DRAFTS)), min_size=1, max_size=3
        ),
        keep=st.booleans(),
    )
    @precondition(lambda self: len(self.flights) < 3)
    def submit(self, shares: list[tuple[int, int, int]], keep: bool) -> None:
        undecided = {row.request for flight in self.flights for row in flight.rows if row.drafts}
        rows: list[StepRow] = []
        for request, count, drafts in {share[0]: share for share in shares}.values():
            drafts = 0 if self.known.get(request) else min(drafts, count - 1)
            if request in undecided:
                continue
            if self.manager.prefixes is not None and request not in self.tokens:
                self.begin(request, count, 60)
                drafts = 0
            could = self.manager.can_grow(request, count, drafts)
            assert self.manager.grow(request, count, drafts) == could
            if could:
                if request not in self.tokens:
                    self.tokens[request], self.lives[request] = [], self.next_life
                    self.next_life += 1
                rows.append(StepRow(request, len(self.tokens[request]), count, drafts))
        if not rows:
            return
        if keep:
            self.snapshot(int(rows[0].request))
        batches = self.manager.group_batches(rows, len(rows) + 1, sum(row.num_tokens for row in rows) + 2)
        self.check_read(rows, batches)
        for row in rows:
            self.feed(int(row.request), row.num_tokens)
        lives = [self.lives[int(row.request)] for row in rows]
        owners = self.owners(rows, lives, batches)
        for flight in self.flights:
            shared = flight.owners.keys() & owners.keys()
            assert all(flight.owners[block] == owners[block] for block in shared), (
                "granted while a step may write to it"
            )
        self.flights.append(Flight(self.manager.begin_step(rows), rows, lives, owners, self.writes(rows, batches)))
        self.replay()

    @rule(request=st.integers(0, 3), count=st.integers(BLOCK, 30), ends=st.booleans())
    @precondition(lambda self: not self.flights and self.manager.prefixes is not None)
    def serve(self, request: int, count: int, ends: bool) -> None:
        """A whole step of one request; perhaps its last."""
        self.submit([(request, count, 0)], False)
        if self.flights:
            self.collect([0, 0, 0])
        if ends:
            self.release(request)

    def feed(self, request: int, count: int) -> None:
        known = self.known.get(request, [])
        self.tokens[request] += known[:count]
        more = count - len(known[:count])
        del known[:count]
        self.tokens[request] += range(self.next_token, self.next_token + more)
        self.next_token += more

    @rule(which=st.integers(0, 9), length=st.integers(BLOCK, 60))
    @precondition(lambda self: self.manager.prefixes is not None and len(self.tokens) < 3)
    def adopt(self, which: int, length: int) -> None:
        """A request whose first tokens are those of another one, now or earlier, as far as it got or was to get."""
        self.begin(next(request for request in range(4) if request not in self.tokens), which, length)

    def begin(self, request: int, which: int, length: int) -> None:
        others = [each for each in (*self.tokens.values(), *self.histories[-6:]) if len(each) >= BLOCK]
        tokens = list(others[which % len(others)][:length]) if others else []
        tokens.append(self.next_token)
        self.next_token += 1
        self.keys[request] = ContentKeys(b"", BLOCK)
        self.extend_keys(request, tokens)
        hit = self.manager.adopt(request, self.keys[request].digests, len(tokens))
        assert hit < len(tokens) and hit % BLOCK == 0
        self.tokens[request], self.known[request] = tokens[:hit], tokens[hit:]
        self.lives[request] = self.next_life
        self.next_life += 1

    def extend_keys(self, request: int, tokens: list[int]) -> None:
        keys = self.keys[request]
        done = keys.num_tokens
        keys.extend(np.array(tokens[done:], np.int64))
        for end in range(done + BLOCK, keys.num_tokens + 1, BLOCK):
            self.content[keys.digests[end // BLOCK - 1]] = tokens[:end]

    @rule(count=st.integers(1, 3))
    @precondition(lambda self: self.manager.prefixes is not None and len(self.manager.prefixes) > 2)
    def evict(self, count: int) -> None:
        prefixes = self.manager.prefixes
        assert prefixes is not None
        wanted = prefixes.num_evictions + count
        assert prefixes.evict(lambda: prefixes.num_evictions >= wanted) == (prefixes.num_evictions == wanted)

    @rule()
    @precondition(lambda self: self.manager.prefixes is not None and len(self.manager.prefixes) > 6)
    def clear(self) -> None:
        self.manager.clear_prefixes()

    @rule(accepted=st.lists(st.integers(0, DRAFTS), min_size=3, max_size=3))
    @precondition(lambda self: self.flights)
    def collect(self, accepted: list[int]) -> None:
        self.replay()
        flight = self.flights.popleft()
        self.manager.end_step(flight.ticket)
        for row, life, taken in zip(flight.rows, flight.lives, accepted, strict=False):
            if not self.alive(row, life):
                continue
            end = row.start + row.num_tokens
            kept = end - row.drafts + min(taken, row.drafts)
            if kept < end:
                self.manager.truncate(row.request, kept)
                del self.tokens[int(row.request)][kept:]
            if int(row.request) in self.keys and self.keys[int(row.request)].num_tokens < kept:
                self.extend_keys(int(row.request), self.tokens[int(row.request)][:kept])
            self.manager.commit(row.request, kept)
        if not self.flights:
            self.manager.poison()

    @rule(which=st.integers(0, 3))
    @precondition(lambda self: len(self.tokens) > 1)
    def release_one(self, which: int) -> None:
        request = sorted(self.tokens)[which % len(self.tokens)]
        self.release(request)
        self.release(request)

    def release(self, request: int) -> None:
        self.manager.release(request)
        if request in self.tokens:
            self.histories.append(self.tokens[request])
        self.tokens.pop(request, None)
        self.known.pop(request, None)
        self.keys.pop(request, None)
        self.lives.pop(request, None)

    def snapshot(self, request: int) -> None:
        """Where the request stands, if that is the end of a block; otherwise at the next one, perhaps in this step."""
        tokens = self.tokens[request]
        quiet = all(row.request != request for flight in self.flights for row in flight.rows)
        here = len(tokens)
        target = here if here and here % BLOCK == 0 and quiet else (here // BLOCK + 1) * BLOCK
        holding = self.manager.snapshot(request, target) if len(self.holdings) < 3 else None
        if holding is not None:
            self.holdings.append((holding, tokens if target > here else list(tokens)))

    @rule(which=st.integers(0, 2))
    @precondition(lambda self: any(holding.complete for holding, _ in self.holdings) and len(self.tokens) < 4)
    def restore(self, which: int) -> None:
        complete = [(holding, tokens) for holding, tokens in self.holdings if holding.complete]
        holding, tokens = complete[which % len(complete)]
        request = next(request for request in range(4) if request not in self.tokens)
        assert self.manager.restore(request, holding) == holding.num_tokens
        self.keys.pop(request, None)
        self.tokens[request], self.lives[request] = tokens[: holding.num_tokens], self.next_life
        self.next_life += 1

    @rule(which=st.integers(0, 2))
    @precondition(lambda self: any(holding.complete for holding, _ in self.holdings) and len(self.holdings) < 4)
    def transfer(self, which: int) -> None:
        complete = [(holding, tokens) for holding, tokens in self.holdings if holding.complete]
        holding, tokens = complete[which % len(complete)]
        self.holdings.append((self.manager.transfer(holding), tokens[: holding.num_tokens]))

    @rule(which=st.integers(0, 3))
    @precondition(lambda self: len(self.holdings) > 1)
    def let_go(self, which: int) -> None:
        holding, _ = self.holdings.pop(which % len(self.holdings))
        self.manager.let_go(holding)
        self.manager.let_go(holding)

    # What steps write, and what must be read

    def owners(
        self, rows: list[StepRow], lives: list[int], batches: tuple[GroupBatch, ...]
    ) -> dict[tuple[int, int], int]:
        found: dict[tuple[int, int], int] = {}
        for place, (row, life) in enumerate(zip(rows, lives, strict=True)):
            for group, batch in enumerate(batches):
                if batch.block_table is not None:
                    written = batch.block_table[place, row.start // batch.block_size :].tolist()
                else:
                    assert batch.write is not None
                    written = [int(batch.write[place])]
                found |= {(group, block): life for block in written if block}
        return found

    def writes(
        self, rows: list[StepRow], batches: tuple[GroupBatch, ...]
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        states = [[folded(self.tokens[int(r.request)][: r.start + k + 1]) for k in range(r.num_tokens)] for r in rows]
        flat = [value for values in states for value in values]
        found = []
        for name in ("paged", "wide", "window", "closed"):
            view = self.data[name]
            mapping = self.group(batches, name).slot_mapping[view.tokens_per_entry][: len(flat)]
            values = [self.tokens[int(r.request)][r.start + k] for r in rows for k in range(r.num_tokens)]
            keep = mapping >= 0
            entries = view.data.shape[1]
            places = torch.stack((mapping[keep] // entries, mapping[keep] % entries))
            found.append((view.data, places, torch.tensor(values)[keep]))
        slots = self.group(batches, "slot")
        assert slots.write is not None and slots.snapshots is not None
        copies = slots.snapshots
        ends = torch.tensor([values[-1] for values in states])
        found.append((self.data["slot"].data, slots.write[None, : len(rows)], ends))
        found.append((self.data["slot"].data, copies[None, :, 1], torch.tensor(flat)[copies[:, 0]]))
        return found

    def replay(self) -> None:
        """All steps in flight write now, in order: the device may be that late."""
        for flight in self.flights:
            for data, places, values in flight.writes:
                data[tuple(places)] = values[:, None].expand(-1, data.shape[-1])

    def check_read(self, rows: list[StepRow], batches: tuple[GroupBatch, ...]) -> None:
        for place, row in enumerate(rows):
            tokens = self.tokens[int(row.request)]
            for name in ("paged", "wide", "window", "closed"):
                view, group = self.data[name], self.group(batches, name)
                assert group.block_table is not None
                first = 0 if group.first_valid is None else int(group.first_valid[place])
                assert name != "window" or first <= max(0, row.start - WINDOW + 1)
                ratio = view.tokens_per_entry
                entries = view.data[group.block_table[place].long()].flatten(0, 1)[: row.start // ratio, 0]
                assert entries[first // ratio :].tolist() == tokens[first : row.start][ratio - 1 :: ratio]
            slots = self.group(batches, "slot")
            assert slots.read is not None
            assert self.data["slot"].data[slots.read[place]].unique().tolist() == [folded(tokens[: row.start])]

    @invariant()
    def every_request_reads_what_it_wrote(self) -> None:
        if not hasattr(self, "manager"):
            return
        rows = [StepRow(request, len(tokens), 0) for request, tokens in self.tokens.items()]
        self.check_read(rows, self.manager.group_batches(rows))

    @invariant()
    def references_are_exact(self) -> None:
        if not hasattr(self, "manager"):
            return
        rows = [StepRow(request, len(tokens), 0) for request, tokens in self.tokens.items()]
        batches = self.manager.group_batches(rows)
        for pool in self.manager._pools:
            spec, batch = self.manager.groups[pool.group], batches[pool.group]
            if spec.is_slot:
                continue
            assert batch.block_table is not None
            counts: dict[int, list[int]] = {}
            for block in batch.block_table.flatten().tolist():
                if block:
                    counts.setdefault(block, [0, 0, 0])[0] += 1
            for holding, _ in self.holdings:
                for block in holding.blocks.get(spec.index, (0, ()))[1]:
                    counts.setdefault(block, [0, 0, 0])[holding.kind] += 1
            for node in self.nodes():
                for block in node.blocks.get(spec.index, (0, ()))[1]:
                    counts.setdefault(block, [0, 0, 0])[Reference.CACHE] += 1
            assert pool.num_cached == sum(count[Reference.CACHE] > 0 for count in counts.values())
            assert pool.num_held == len(counts)
            assert all(pool.references(block) == tuple(count) for block, count in counts.items())

    def nodes(self) -> list[Node]:
        return [] if self.manager.prefixes is None else list(self.manager.prefixes._nodes.values())

    @invariant()
    def whatever_is_cached_holds_what_its_key_says(self) -> None:
        if not hasattr(self, "manager"):
            return
        for node in self.nodes():
            tokens = self.content[node.key]
            assert len(tokens) == node.end
            assert node.parent is None or node.parent.alive
            for name in ("paged", "wide", "window", "closed"):
                view = self.data[name]
                if name == "window" and view.group not in node.blocks:
                    continue
                first, blocks = node.blocks[view.group]
                entries = view.data[list(blocks)].flatten(0, 1)[:, 0].tolist()
                assert entries == tokens[first * BLOCK :][view.tokens_per_entry - 1 :: view.tokens_per_entry]
            for slot in node.slots.values():
                assert self.data["slot"].data[slot].unique().tolist() == [folded(tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for flight in self.flights:
            self.manager.end_step(flight.ticket)
        for request in list(self.tokens):
            self.release(request)
        for holding, _ in self.holdings:
            self.manager.let_go(holding)
        self.manager.clear_prefixes()
        assert self.manager.num_waiting == 0
        assert self.manager.arena.num_free == self.manager.arena.plan.num_extents


TestStateManager = Machine.TestCase
TestStateManager.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
