"""What one request takes from and gives to the prefix cache: where it starts, what it publishes, when it is copied.

Only committed content is published, stretch by stretch; copies of slots are asked for ahead of the step that passes
their place, and given to their node when that step was collected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rtp_runtime.state.descriptors import Snapshots
from rtp_runtime.state.grouping import GroupSpec
from rtp_runtime.state.holding import Holding
from rtp_runtime.state.memory import StateMemory, first_place
from rtp_runtime.state.pool import Reference
from rtp_runtime.state.prefix import Match, Node, PrefixCache
from rtp_runtime.state.requests import UNBOUNDED, RequestState


@dataclass(slots=True)
class Share:
    """A request's part in the cache."""

    keys: Sequence[bytes]
    """Of the request's tokens, as far as they are known; grows while it runs."""
    num_known: int
    """Tokens that it had to feed when it began."""
    marks: list[int]
    """Places of copies within them, the next one last."""
    node: Node | None = None
    """The last one that it started from or published."""
    published: int = 0
    """Tokens up to there."""
    latest: Node | None = None
    """The node that has the copy which moves along."""
    next_copy: int = UNBOUNDED
    """Place of the next copy to be asked for."""


class PrefixSharing:
    """Lends cached prefixes to requests, and keeps what they compute."""

    def __init__(self, memory: StateMemory, memory_limit: int | None) -> None:
        self.cache = PrefixCache(memory, memory_limit)
        self._memory = memory
        self._slots = [spec.index for spec in memory.groups if spec.is_slot]
        self._policy = _joined(memory.groups)
        self._every = -(-self._policy.every // self.cache.unit) * self.cache.unit

    def match(self, keys: Sequence[bytes], num_tokens: int) -> Match:
        """What a request of so many tokens can start from; at least one token is left to compute."""
        return self.cache.match(keys, num_tokens - 1)

    def join(self, state: RequestState, keys: Sequence[bytes], num_tokens: int, match: Match) -> None:
        """Make a new request, restored from the match, a part of the cache."""
        start = match.nodes[-1].end if match.nodes else 0
        share = Share(keys, num_tokens, [], match.nodes[-1] if match.nodes else None, start)
        state.share = share
        if not self._slots:
            return
        unit, policy = self.cache.unit, self._policy
        marks = set(range(self._every, num_tokens, self._every)) if self._every else set[int]()
        if policy.branch:
            marks.add(match.known)
        if policy.prompt_end:
            marks.add((num_tokens - 1) // unit * unit)
        share.marks = sorted((mark for mark in marks if mark > start), reverse=True)
        share.next_copy = self._next_copy(share, start)

    def ask(self, state: RequestState) -> None:
        """Ask for the copies that the tokens which the request has grown by pass."""
        share = state.share
        while share is not None and share.next_copy <= state.length:
            place = share.next_copy
            lasting = place in share.marks or bool(self._every and place % self._every == 0)
            if place > state.submitted and self._room():
                pools = self._memory.pools
                slots = {group: pools[group].allocate(1, Reference.CACHE)[0] for group in self._slots}
                state.snapshots.append(Holding(place, Reference.CACHE, slots=slots, lasting=lasting))
            if share.marks and share.marks[-1] == place:
                share.marks.pop()
            share.next_copy = self._next_copy(share, place)

    def publish(self, state: RequestState) -> None:
        """Keep what the request has committed since the last call."""
        share = state.share
        unit = self.cache.unit
        if share is None or state.committed - share.published < unit:
            return
        if share.node is not None and not share.node.alive:
            # Another request's, of equal content, that was let go meanwhile: begin again with blocks of its own.
            share.node, share.published = None, 0
        for end in range(share.published + unit, state.committed + 1, unit):
            place = end // self.cache.key_unit - 1
            if place >= len(share.keys):
                return
            node = self.cache.publish(share.node, share.keys[place], end, self._blocks(state, end))
            if node is None:
                return
            share.node, share.published = node, end

    def deliver(self, state: RequestState, holding: Holding) -> bool:
        """Give a copy that is there now to its node; False when the cache has no use for it."""
        share = state.share
        node = None if share is None else self.cache.find(share.keys, holding.num_tokens)
        if share is None or node is None:
            return False
        taken = self.cache.attach(node, holding.slots, lasting=bool(holding.lasting))
        if not holding.lasting:
            if share.latest is not None:
                self.cache.let_slots_go(share.latest)
            share.latest = node if taken else None
        return taken

    def make_room(self, needs: Sequence[int], requests: Iterable[RequestState]) -> bool:
        """Let cached prefixes go until so many blocks of each group are free.

        False when that cannot be, or not before the steps in flight have ended.
        """
        memory = self._memory
        if memory.available(needs):
            return True
        if not memory.obtainable(needs, cached=True):
            return False

        def enough() -> bool:
            return memory.available(needs) or (
                memory.steps.num_waiting > 0 and memory.obtainable(needs, cached=False)
            )  # fmt: skip

        if not self.cache.evict(enough):
            for state in requests:
                self._give_up_copies(state)
        return memory.available(needs)

    def _room(self) -> bool:
        """Whether there are slots for one more copy."""
        needs = [int(spec.is_slot) for spec in self._memory.groups]
        return self.cache.room_for_slots() and self.make_room(needs, ())

    def _give_up_copies(self, state: RequestState) -> None:
        """Copies that are still to be made are no reason to preempt anyone."""
        for holding in state.snapshots:
            if holding.lasting is not None and not holding.released:
                holding.released = True
                for group, slot in holding.slots.items():
                    self._memory.drop(group, [slot], Reference.CACHE)

    def _blocks(self, state: RequestState, end: int) -> dict[int, tuple[int, tuple[int, ...]]]:
        """The blocks that the stretch up to `end` keeps: all of it, of windows what later tokens may read."""
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for group, table in self._memory.tables.items():
            spec = self._memory.groups[group]
            first = max((end - self.cache.unit) // spec.block_size, first_place(spec, end))
            # What the request itself has passed was published before, or is of no use.
            if first >= state.first[group]:
                found[group] = first, tuple(table.get(state.row, first, end // spec.block_size))
        return found

    def _next_copy(self, share: Share, after: int) -> int:
        if share.marks:
            return share.marks[-1]
        unit = self.cache.unit
        if self._policy.latest:
            return max(after // unit + 1, -(-share.num_known // unit)) * unit
        return (after // self._every + 1) * self._every if self._every else UNBOUNDED


def _joined(groups: Sequence[GroupSpec]) -> Snapshots:
    """Copies are of use only where all slot groups have them: every place that one of them asks for."""
    asked = [spec.retention for spec in groups if spec.retention is not None]
    return Snapshots(
        prompt_end=any(each.prompt_end for each in asked),
        branch=any(each.branch for each in asked),
        latest=any(each.latest for each in asked),
        every=min((each.every for each in asked if each.every), default=0),
    )
