"""What is kept beyond the life of a request, as references to blocks and slots: cached prefixes and transfers."""

from __future__ import annotations

from dataclasses import dataclass, field

from rtp_runtime.state.pool import Reference


@dataclass(slots=True, eq=False)
class Holding:
    """References of one kind to the state of a prefix. The manager makes it and lets it go."""

    num_tokens: int
    """Length of the prefix."""
    kind: Reference
    complete: bool = False
    """The content is there: computed, collected, and no longer open to a rewind."""
    released: bool = False
    blocks: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Block groups: group -> (place of the first block in the prefix, ids)."""
    slots: dict[int, int] = field(default_factory=dict)
    """Slot groups: group -> slot."""
    lasting: bool | None = None
    """A copy on its way into the prefix cache: whether it outlives the next one of its request. None: another's."""
