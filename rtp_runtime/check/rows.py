"""Which rows of an engine step belong to which prompt: how packed tokens meet the reference's single prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of a step that are tokens of one prompt."""

    prompt: str
    rows: Tensor
    """[n] int64, row of the step."""
    index: Tensor
    """[n] int64, the token's place in the prompt."""


class RowMatcher:
    """Recognises requests by their tokens. `sequences`: prompt name -> all tokens for which there is a reference."""

    def __init__(self, sequences: Mapping[str, Sequence[int]]) -> None:
        self._sequences = {name: torch.tensor(list(ids)) for name, ids in sequences.items()}
        self._progress = dict.fromkeys(sequences, 0)

    def segments(self, batch: ForwardBatch) -> list[Segment]:
        """The step's segments; tokens past the end of their sequence are left out, and so are unknown ones."""
        starts = batch.query_start.tolist()
        found = [self._segment(batch, starts[place], starts[place + 1]) for place in range(batch.num_requests)]
        return [segment for segment in found if segment is not None]

    def _segment(self, batch: ForwardBatch, start: int, stop: int) -> Segment | None:
        rows = torch.arange(start, stop)
        rows = rows[batch.index[start:stop].cpu() >= 0]
        if not len(rows):
            return None
        index = batch.index[rows].cpu()
        name = self._owner(batch.input_ids[rows].cpu(), index)
        if name is None:
            return None
        self._progress[name] = int(index[-1]) + 1
        known = index < len(self._sequences[name])
        return Segment(name, rows[known], index[known])

    def _owner(self, ids: Tensor, index: Tensor) -> str | None:
        """The prompt that holds these tokens there; among several, the one that was expected to go on there."""
        fitting = [name for name, sequence in self._sequences.items() if _holds(sequence, ids, index)]
        expected = [name for name, done in self._progress.items() if done == int(index[0])]
        both = [name for name in fitting if name in expected]
        return next(iter(both or fitting or expected), None)


def _holds(sequence: Tensor, ids: Tensor, index: Tensor) -> bool:
    known = index < len(sequence)
    return bool(known.any()) and torch.equal(sequence[index[known]], ids[known])
