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
        """The prompt with most of these tokens there; of several, the one that was expected to go on there.

        One that has none of them is taken only if it was expected: the engine then feeds it wrong tokens.
        """
        best, best_score = None, (0, False)
        for name, sequence in self._sequences.items():
            known = index < len(sequence)
            num_equal = int((sequence[index[known]] == ids[known]).sum())
            score = (num_equal, self._progress[name] == int(index[0]))
            if score > best_score:
                best, best_score = name, score
        return best
