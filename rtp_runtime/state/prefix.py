"""The cache of prefixes: which computed content is kept for requests to come, found by its key, let go by its age.

A node is one stretch of a prefix, as long as the blocks of all groups allow; it keeps its blocks and, at some nodes,
slots that hold the state after its last token. Nodes are let go least recently used first, each after its children.
What only serves prefixes that end nearby (window blocks, slots) has an age of its own and can go before its node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import gcd, lcm
from typing import Final, Literal

from rtp_runtime.state.grouping import DEFAULT_BLOCK_SIZE, GroupSpec
from rtp_runtime.state.memory import StateMemory, first_place
from rtp_runtime.state.pool import Reference

Part = Literal["node", "windows", "slots"]
PARTS: Final[tuple[Part, ...]] = ("node", "windows", "slots")
Places = tuple[int, tuple[int, ...]]
"""(place of the first block in the request, block ids)"""


@dataclass(slots=True, eq=False)
class Node:
    """One stretch of a cached prefix."""

    key: bytes
    parent: Node | None
    end: int
    """Tokens of the prefix that ends here."""
    blocks: dict[int, Places]
    """By block group. Of windows only what a prefix that ends here or later reads; absent when let go."""
    slots: dict[int, int] = field(default_factory=dict)
    """By slot group, all or none: the state after the prefix."""
    lasting: bool = False
    """The slots serve other requests than the one that left them."""
    children: int = 0
    alive: bool = True
    used: dict[Part, int] = field(default_factory=dict)
    """When each part was used last."""


@dataclass(frozen=True, slots=True)
class Match:
    """What is cached of a prefix: the nodes to start from, and how far tokens are known beyond them."""

    nodes: Sequence[Node]
    known: int
    """Tokens up to which nodes exist; beyond the last of `nodes` some group lacks what a request needs to start."""


class PrefixCache:
    """Nodes over the memory of all groups.

    `memory_limit` is how many bytes they may refer to; None: all there are.
    """

    def __init__(self, memory: StateMemory, memory_limit: int | None) -> None:
        sizes = [spec.block_size for spec in memory.groups if not spec.is_slot] or [DEFAULT_BLOCK_SIZE]
        self.key_unit = gcd(*sizes)
        """Tokens of one link of a key chain."""
        self.unit = lcm(*sizes)
        """Tokens of one node: prefixes end where blocks of all groups end."""
        self.num_evictions = 0
        self._memory = memory
        self._limit = memory_limit
        self._windows = [spec for spec in memory.groups if spec.window]
        self._slots = [spec for spec in memory.groups if spec.is_slot]
        self._most = [int(_share(spec, memory)) for spec in memory.groups]
        self._nodes: dict[bytes, Node] = {}
        self._ages: dict[Part, list[tuple[int, int, Node]]] = {part: [] for part in PARTS}
        """Heaps of (last use, tie-break, node); an entry whose time is not the node's any more counts for nothing."""
        self._clock = count(1)
        self._ties = count()

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, keys: Sequence[bytes], end: int) -> Node | None:
        """The node of the prefix of `end` tokens."""
        place = end // self.key_unit - 1
        return self._nodes.get(keys[place]) if place < len(keys) else None

    def match(self, keys: Sequence[bytes], num_tokens: int) -> Match:
        """The longest prefix of at most `num_tokens` tokens that every group can supply."""
        path: list[Node] = []
        hit = 0
        lacking = dict.fromkeys((spec.index for spec in self._windows), -1)
        for end in range(self.unit, num_tokens + 1, self.unit):
            node = self.find(keys, end)
            if node is None:
                break
            for group in lacking:
                if group not in node.blocks:
                    lacking[group] = len(path)
            path.append(node)
            windows = all(lacking[spec.index] < first_place(spec, end) * spec.block_size // self.unit
                          for spec in self._windows)  # fmt: skip
            if windows and (node.slots or not self._slots):
                hit = len(path)
        return Match(path[:hit], len(path) * self.unit)

    def use(self, nodes: Sequence[Node]) -> tuple[dict[int, Places], dict[int, int]]:
        """What a request that starts after these nodes takes over: places by block group, and slots by slot group."""
        now = next(self._clock)
        last = nodes[-1]
        for node in nodes:
            node.used["node"] = now
        reach = min((first_place(spec, last.end) * spec.block_size for spec in self._windows), default=last.end)
        for node in nodes[reach // self.unit :]:
            self._touch(node, "windows", now)
        self._touch(last, "slots", now)
        self._touch(last, "node", now)
        last.lasting = True
        blocks: dict[int, Places] = {}
        for spec in self._memory.groups:
            if not spec.is_slot:
                first = first_place(spec, last.end)
                parts = [node.blocks[spec.index] for node in nodes[first * spec.block_size // self.unit :]]
                found = [block for start, ids in parts for block in ids[max(0, first - start) :]]
                blocks[spec.index] = first, tuple(found)
        return blocks, dict(last.slots)

    def publish(self, parent: Node | None, key: bytes, end: int, blocks: Mapping[int, Places]) -> Node | None:
        """Keep the content of one more stretch; a node that is there already gains what it lacks.

        Where the same content lies in other blocks that nobody else keeps, those go: once is enough, and a stretch in
        use would hold what lies before it. None when more would be kept than the cache may keep.
        """
        node = self._nodes.get(key)
        if node is None or not blocks.keys() <= node.blocks.keys():
            if not self._fits({group: len(ids) for group, (_, ids) in blocks.items()}):
                return self._nodes.get(key)
            node = self._nodes.get(key)
        if node is None:
            if parent is not None and not parent.alive:
                return None
            node = self._nodes[key] = Node(key, parent, end, {})
            if parent is not None:
                parent.children += 1
        self._replace_unused(node, blocks)
        lacking = {group: each for group, each in blocks.items() if group not in node.blocks}
        for group, (_, ids) in lacking.items():
            self._memory.pools[group].take(ids, Reference.CACHE)
        node.blocks |= lacking
        now = next(self._clock)
        self._touch(node, "node", now)
        if any(spec.index in lacking for spec in self._windows):
            self._touch(node, "windows", now)
        return node

    def _replace_unused(self, node: Node, blocks: Mapping[int, Places]) -> None:
        for group, (first, ids) in blocks.items():
            before, old = node.blocks.get(group, (first, ids))
            if before == first and old != ids and self._memory.pools[group].only_cached(old):
                self._memory.pools[group].take(ids, Reference.CACHE)
                self._memory.drop(group, old, Reference.CACHE, settled=True)
                node.blocks[group] = first, ids

    def attach(self, node: Node, slots: dict[int, int], *, lasting: bool) -> bool:
        """Give a node the state after it, whose references become the node's; False when it has one."""
        node.lasting |= lasting
        if node.slots or not node.alive:
            return False
        node.slots = slots
        self._touch(node, "slots", next(self._clock))
        return True

    def room_for_slots(self) -> bool:
        """Whether one more slot of each slot group may be kept, if need be in the place of the oldest."""
        return self._fits({spec.index: 1 for spec in self._slots})

    def let_slots_go(self, node: Node) -> None:
        """A node's slots, if they serve nobody but the request that left them."""
        if node.alive and node.slots and not node.lasting and self._is_free(node, "slots"):
            self._let_go(node, "slots")

    def evict(self, done: Callable[[], bool], parts: Sequence[Part] = PARTS) -> bool:
        """Let go of what was used longest ago of what nobody else keeps, until `done`; False when nothing is left."""
        aside: list[tuple[Part, tuple[int, int, Node]]] = []
        try:
            while not done():
                part = min((part for part in parts if self._ages[part]), key=lambda p: self._ages[p][0], default=None)
                if part is None:
                    return False
                entry = heappop(self._ages[part])
                node = entry[2]
                if not self._counts(entry, part):
                    continue
                if self._is_free(node, part):
                    self.num_evictions += 1
                    self._let_go(node, part)
                else:
                    aside.append((part, entry))
            return True
        finally:
            for part, entry in aside:
                heappush(self._ages[part], entry)

    def clear(self) -> None:
        """Let go of everything; what somebody else keeps stays with them."""
        for node in list(self._nodes.values()):
            node.children = 0
            self._let_go(node, "node")
        for part in PARTS:
            self._ages[part].clear()

    def _fits(self, more: Mapping[int, int]) -> bool:
        """Whether so many more blocks of each group may be kept, once older ones have made way."""
        memory, limit = self._memory, self._limit
        for group, blocks in more.items():
            pool, most = memory.pools[group], self._most[group] - blocks
            if pool.num_cached > most:
                spec = memory.groups[group]
                part: Part = "slots" if spec.is_slot else "windows" if spec.window else "node"
                if not self.evict(lambda pool=pool, most=most: pool.num_cached <= most, (part,)):  # type: ignore[misc]
                    return False
        if limit is None:
            return True
        num_bytes = sum(blocks * memory.groups[group].block_bytes for group, blocks in more.items())
        return self.evict(lambda: memory.cached_bytes + num_bytes <= limit)

    def _touch(self, node: Node, part: Part, now: int) -> None:
        node.used[part] = now
        ages = self._ages[part]
        if part != "node" or node.children == 0:
            heappush(ages, (now, next(self._ties), node))
        if len(ages) > 64 + 4 * len(self._nodes):
            ages[:] = [entry for entry in ages if self._counts(entry, part)]
            heapify(ages)

    def _counts(self, entry: tuple[int, int, Node], part: Part) -> bool:
        """Whether a heap's entry stands for something that can be let go."""
        used, _, node = entry
        if not node.alive or node.used.get(part) != used:
            return False
        if part == "node":
            return node.children == 0
        return bool(node.slots) if part == "slots" else any(spec.index in node.blocks for spec in self._windows)

    def _is_free(self, node: Node, part: Part) -> bool:
        """Whether nobody but the cache keeps what would go."""
        pools = self._memory.pools
        blocks, slots = self._parts(node, part)
        return all(pools[group].only_cached(ids) for group, (_, ids) in blocks.items()) and all(
            pools[group].only_cached([slot]) for group, slot in slots.items()
        )

    def _parts(self, node: Node, part: Part) -> tuple[dict[int, Places], dict[int, int]]:
        if part == "node":
            return node.blocks, node.slots
        if part == "slots":
            return {}, node.slots
        windows = {spec.index for spec in self._windows}
        return {group: each for group, each in node.blocks.items() if group in windows}, {}

    def _let_go(self, node: Node, part: Part) -> None:
        blocks, slots = self._parts(node, part)
        for group, (_, ids) in blocks.items():
            self._memory.drop(group, ids, Reference.CACHE, settled=True)
        for group, slot in slots.items():
            self._memory.drop(group, [slot], Reference.CACHE, settled=True)
        if slots:
            node.slots = {}
        node.blocks = {group: each for group, each in node.blocks.items() if group not in blocks}
        if part != "node":
            return
        node.alive = False
        del self._nodes[node.key]
        parent = node.parent
        if parent is not None and parent.alive:
            parent.children -= 1
            self._touch(parent, "node", parent.used["node"])


def _share(spec: GroupSpec, memory: StateMemory) -> float:
    """Blocks of a group that its capacity lets the cache keep."""
    plan = memory.arena.plan
    return spec.capacity * plan.num_extents * plan.blocks_per_extent(spec.index)
