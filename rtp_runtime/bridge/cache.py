"""What transformers' blocks ask of a cache, answered from one request's share of our state pools.

No cache of transformers is behind it: keys and values are written to the blocks that our scheduler granted, and
recurrent states to its slots. A second form only listens, and tells which states a block keeps and how large they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.state import gather_state

KEY, VALUE, INDEX = "key", "value", "index"
CONV, RECURRENT = "conv", "recurrent"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens of one request in one step: their rows, and the place of the first in the request."""

    request: int
    rows: range
    first: int

    @property
    def end(self) -> int:
        return self.first + len(self.rows)


@dataclass(slots=True)
class RequestStates:
    """The states of one request in one layer, while a block of transformers runs over one piece."""

    views: Mapping[str, StateView]
    batch: ForwardBatch
    piece: Piece
    window: int | None
    slots: dict[str, Tensor]
    """Recurrent states [1, *axes] as they stand before the piece, and after it has run. Empty for a new request."""
    written: set[str] = field(default_factory=set)

    @property
    def start(self) -> int:
        """Place of the first token that is still held and that the piece's tokens may see."""
        return 0 if self.window is None else max(0, self.piece.first - self.window + 1)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """[1, heads, tokens, dim] of the piece -> the same of all tokens that it may see."""
        return self._extend(KEY, keys), self._extend(VALUE, values)

    def update_indexer(self, keys: Tensor, *_: Any) -> Tensor:
        """[1, tokens, dim] of the piece -> the same of all tokens."""
        return self._extend(INDEX, keys[:, None])[:, 0]

    def _extend(self, name: str, new: Tensor) -> Tensor:
        view, piece = self.views[name], self.piece
        places = self.batch.groups[view.group].slot_mapping[view.tokens_per_entry][piece.rows.start : piece.rows.stop]
        size = view.data.shape[1]
        view.data[places // size, places % size] = new[0].transpose(0, 1).to(view.data.dtype)
        self.written.add(name)
        held = gather_state(view, self.batch, piece.request, range(self.start, piece.end))
        return held.transpose(0, 1)[None].to(new.dtype)

    def get_seq_length(self, *_: Any) -> int:
        """Tokens before this piece."""
        return self.piece.first

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return self.piece.first > 0

    def is_recording_past(self, *_: Any) -> bool:
        return False

    def get_conv_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        """[1, channels, kernel], or None for a new request."""
        return self.slots.get(f"{CONV}{state_idx}")

    def update_conv_state(
        self, new: Tensor, layer: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """[1, channels, tokens] of the piece -> the same after what the state holds; for a new request, after zeros."""
        name = f"{CONV}{state_idx}"
        kernel = conv_kernel_size or self.views[name].data.shape[-1]
        before = self.slots.get(name)
        full = _after_zeros(new, kernel) if before is None else torch.cat((before.to(new.dtype), new), dim=-1)
        self.slots[name] = full[..., -kernel:].clone()
        self.written.add(name)
        return full

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> Tensor | None:
        """[1, *axes], or None for a new request."""
        return self.slots.get(f"{RECURRENT}{state_idx}")

    def update_recurrent_state(self, state: Tensor, layer: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep the state after the piece."""
        name = f"{RECURRENT}{state_idx}"
        self.slots[name] = state
        self.written.add(name)
        return state


@dataclass(slots=True)
class Listener:
    """Takes every state of a new request and remembers its shape and dtype."""

    paged: dict[str, Tensor] = field(default_factory=dict)
    slots: dict[str, Tensor] = field(default_factory=dict)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.paged |= {KEY: keys, VALUE: values}
        return keys, values

    def update_indexer(self, keys: Tensor, *_: Any) -> Tensor:
        self.paged[INDEX] = keys[:, None]
        return keys

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def is_recording_past(self, *_: Any) -> bool:
        return False

    def get_conv_state(self, layer: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self, new: Tensor, layer: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        kernel = conv_kernel_size or new.shape[-1]
        full = _after_zeros(new, kernel)
        self.slots[f"{CONV}{state_idx}"] = full[..., -kernel:]
        return full

    def update_recurrent_state(self, state: Tensor, layer: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.slots[f"{RECURRENT}{state_idx}"] = state
        return state


def _after_zeros(new: Tensor, kernel: int) -> Tensor:
    """[1, channels, tokens] of a new request with zeros in front, so that there are at least `kernel`."""
    return torch.nn.functional.pad(new, (max(0, kernel - new.shape[-1]), 0))
