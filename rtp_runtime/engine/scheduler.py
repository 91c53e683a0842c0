"""Which requests take part in the next step, and with how many tokens. Works on counts; never sees a token's value.

Requests are served by age. Decodes come first in the token budget, prefill takes chunks of what they leave, and a
growth that the state cannot serve preempts the youngest request, which is recomputed later. A request begins with what
the state has kept of the same beginning.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rtp_runtime.engine.config import EngineConfig
from rtp_runtime.engine.request import Request


class StateLedger(Protocol):
    """The part of the state manager that scheduling asks."""

    def adopt(self, request: str, keys: Sequence[bytes], num_tokens: int, *, lookup: bool = True) -> int: ...

    def can_grow(self, request: str, num_tokens: int) -> bool: ...

    def clear_prefixes(self) -> None: ...

    def grow(self, request: str, num_tokens: int, drafts: int = 0) -> bool: ...

    def release(self, request: str) -> None: ...

    @property
    def num_waiting(self) -> int: ...


class Chunk(NamedTuple):
    """`num_tokens` new tokens of a request, from `start` on."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """The chunk ends with the last token that is to be fed, so that the next one is sampled from it."""
    from_table: bool
    """Its token is the one that the previous step of this request left in the device table."""
    output_index: int
    """Place of the sampled token among the request's outputs."""
    generation: int
    drafts: tuple[int, ...] = ()
    """Its last tokens, when they are guesses that may be rejected."""

    @property
    def is_decode(self) -> bool:
        return self.num_tokens - len(self.drafts) == 1 and self.start > 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: chunks of one token, or one and drafts, first; those fed from the device table leading."""

    chunks: tuple[Chunk, ...]
    num_decodes: int
    num_tokens: int


@dataclass(slots=True)
class ReuseCounts:
    """Admissions for which a cached prefix was looked for, and what was found."""

    lookups: int = 0
    hits: int = 0
    lookup_tokens: int = 0
    cached_tokens: int = 0


class Scheduler:
    """Holds the waiting and the running requests and plans steps over them."""

    def __init__(self, config: EngineConfig, state: StateLedger, *, run_ahead: bool = True) -> None:
        """With `run_ahead` a request's next token is fed before the host knows it; without, drafts can follow it."""
        self._state = state
        self._run_ahead = run_ahead
        self._max_seqs = config.max_num_seqs
        self._budget = config.max_num_batched_tokens
        self._max_chunk = config.max_chunk_tokens or config.max_num_batched_tokens
        self._rows = list(reversed(range(config.max_num_seqs)))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.reuse = ReuseCounts()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> Plan:
        """The next step; a plan without chunks when nothing can be submitted before more is collected."""
        chunks, budget, served = self._continue_running()
        if served or not self.running:  # one that gave up its own state may begin anew at once
            self._admit(chunks, budget)
        chunks.sort(key=_decodes_first)
        num_decodes = sum(chunk.is_decode for chunk in chunks)
        return Plan(tuple(chunks), num_decodes, sum(chunk.num_tokens for chunk in chunks))

    def preempt(self, request: Request) -> None:
        """Give up the request's state; it waits, before all younger ones, to be recomputed."""
        self._leave(request)
        request.num_computed = 0
        request.generation += 1
        request.from_table = False
        older = sum(other.arrival < request.arrival for other in self.waiting)
        self.waiting.insert(older, request)
        self.num_preemptions += 1

    def finish(self, request: Request) -> None:
        """Forget the request, wherever it stands, and free what it holds."""
        if request.row >= 0:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _continue_running(self) -> tuple[list[Chunk], int, bool]:
        """Chunks for the running requests, oldest first; the token budget left; whether all could grow."""
        chunks: list[Chunk] = []
        preemptions = self.num_preemptions
        budget = self._budget - sum(request.num_tokens - request.num_computed == 1 for request in self.running)
        place = 0
        while place < len(self.running):
            request = self.running[place]
            remaining = request.num_tokens - request.num_computed
            if request.from_table and request.in_flight and not self._run_ahead:
                remaining = 0
            size = remaining if remaining <= 1 else min(remaining, budget, self._max_chunk)
            drafts = request.drafts[: max(budget, 0)] if size == 1 else ()
            if drafts and self._state.grow(request.request_id, 1 + len(drafts), len(drafts)):
                budget -= len(drafts)
                chunks.append(_advance(request, 1, drafts))
                place += 1
                continue
            if size and not self._grow(request, size):
                return chunks, budget, False
            if size:
                budget -= size if remaining > 1 else 0
                chunks.append(_advance(request, size))
            place += 1
        return chunks, budget, self.num_preemptions == preemptions

    def _grow(self, request: Request, size: int) -> bool:
        """Make room for `size` tokens, if need be at the cost of the youngest.

        False when that is the request itself, or when what was given up becomes free only after a step in flight.
        """
        while not self._state.grow(request.request_id, size):
            if self._state.num_waiting:
                return False
            youngest = self.running[-1]
            self.preempt(youngest)
            if youngest is request:
                if not self.running:
                    # Alone it fits, as admission has found, once nothing scattered is shared with cached prefixes.
                    self._state.clear_prefixes()
                return False
        return True

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self._max_seqs:
            request = self.waiting[0]
            # A token that is still in flight is unknown to the host, which must feed it again.
            if request.in_flight:
                return
            start = self._adopt(request)
            size = min(request.num_tokens - start, budget, self._max_chunk)
            if not self._has_room(request, start) or not self._state.grow(request.request_id, size):
                self._state.release(request.request_id)
                if start and not self.running and not self._state.num_waiting:
                    # What it shared lies scattered; alone and from nothing it fits, as admission has found.
                    self._state.clear_prefixes()
                    continue
                return
            self.waiting.popleft()
            self._count(request, start)
            request.num_computed = start
            request.row = self._rows.pop()
            insort(self.running, request, key=lambda other: other.arrival)
            chunks.append(_advance(request, size))
            budget -= size

    def _adopt(self, request: Request) -> int:
        """Tokens of a request that need not be computed; it has state for them now."""
        if request.keys is None:
            return 0
        return self._state.adopt(request.request_id, request.keys.digests, request.num_tokens, lookup=request.may_skip)

    def _has_room(self, request: Request, start: int) -> bool:
        """Room for the whole of it, so that it is not preempted at once by those it would join."""
        return not self.running or self._state.can_grow(request.request_id, request.num_tokens - start)

    def _count(self, request: Request, start: int) -> None:
        if request.keys is None or not request.may_skip:
            return
        self.reuse.lookups += 1
        self.reuse.hits += start > 0
        self.reuse.lookup_tokens += request.num_tokens
        self.reuse.cached_tokens += start
        if not request.generation:
            request.num_cached_tokens = start

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._rows.append(request.row)
        request.row = -1
        self._state.release(request.request_id)


def _advance(request: Request, size: int, drafts: tuple[int, ...] = ()) -> Chunk:
    """Plan `size` tokens of the request, and drafts after them, and count them as fed."""
    start = request.num_computed
    end = start + size
    samples = end == request.num_tokens
    from_table = request.from_table and not drafts
    fed = size + len(drafts)
    chunk = Chunk(request, start, fed, samples, from_table, request.num_outputs, request.generation, drafts)
    request.num_computed = start + fed
    request.in_flight += 1
    request.drafts = ()
    if drafts:
        # How far it got is known when the step is collected; until then there is nothing more to feed.
        request.num_tokens = request.num_computed
        request.from_table = False
    elif samples:
        request.num_outputs += 1
        if request.num_outputs < request.limit:
            request.num_tokens += 1
            request.from_table = True
    return chunk


def _decodes_first(chunk: Chunk) -> int:
    return 0 if chunk.from_table else 1 if chunk.is_decode else 2
