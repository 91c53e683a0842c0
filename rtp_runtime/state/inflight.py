"""Steps that were submitted and not collected, and the blocks that wait for them before they are free."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rtp_runtime.state.pool import BlockPool


class StepsInFlight:
    """A step in flight when a block loses its last reference may still use it: the block is recycled after them all."""

    def __init__(self) -> None:
        self._next = 0
        self._running: set[int] = set()
        self._waiting: deque[tuple[int, BlockPool, Sequence[int]]] = deque()
        """(last step begun when the blocks were let go, their pool, the blocks), in that order"""

    def __len__(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Blocks and slots that become free when the steps in flight have ended."""
        return sum(len(blocks) for _, _, blocks in self._waiting)

    @property
    def latest(self) -> int:
        """Ticket of the step that was begun last."""
        return self._next

    def begin(self) -> int:
        """A ticket for a step that is submitted now."""
        self._next += 1
        self._running.add(self._next)
        return self._next

    def end(self, ticket: int) -> None:
        """The step no longer touches memory; a second call changes nothing."""
        self._running.discard(ticket)
        oldest = min(self._running, default=self._next + 1)
        while self._waiting and self._waiting[0][0] < oldest:
            _, pool, blocks = self._waiting.popleft()
            pool.recycle(blocks)

    def recycle(self, pool: BlockPool, blocks: Sequence[int], *, settled: bool = False) -> None:
        """Make blocks that nobody keeps free: after the steps in flight, or now if no step can use them.

        `settled` blocks are used by no step but those that the pool was told of.
        """
        if self._running and blocks:
            first = min(self._running) if settled else 0
            unused = pool.unused_since(blocks, first)
            late = [block for block, each in zip(blocks, unused, strict=True) if not each]
            if late:
                self._waiting.append((self._next, pool, late))
                blocks = [block for block, each in zip(blocks, unused, strict=True) if each]
        pool.recycle(blocks)
