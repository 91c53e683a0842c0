"""Sparse attention in two steps: score and select, then attend to the selection.

A selection is int64 [N, groups, k]: for each query row, and for each group of heads that shares it (1, or the number of
kv heads), the places (token index, or entry index of a compressed state) that the query attends to, each once, or -1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.ops.topk import top_k


def select(scores: Tensor, k: int) -> Tensor:
    """The k best places of scores [N, groups, places] float32 -> int64 [N, groups, min(k, places)], best first.

    Ties go to the lower place. Places with a score of -inf cannot be seen and come out as -1.
    """
    values, places = top_k(scores, min(k, scores.shape[-1]))
    return places.masked_fill(values == float("-inf"), -1)


def selected(selection: Tensor, places: int) -> Tensor:
    """[N, groups, places] bool: whether a place is in the selection."""
    mask = torch.zeros(*selection.shape[:-1], places + 1, dtype=torch.bool, device=selection.device)
    return mask.scatter_(-1, torch.where(selection < 0, places, selection), True)[..., :places]
