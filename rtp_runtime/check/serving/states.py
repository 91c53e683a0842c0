"""The dtype in which states are kept from step to step, against that of the reference's cache in the serving dtype.

One step rounds a state no more than its inputs are rounded, so that no comparison of a prompt sees it; over many steps
it adds up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rtp_runtime.check.compare import tensors_of
from rtp_runtime.check.ours import OurModel
from rtp_runtime.check.reference import Reference


@dataclass(frozen=True, slots=True)
class NarrowState:
    """A state of ours that is narrower than the reference's of the same size."""

    layer: int
    name: str
    ours: torch.dtype
    reference: torch.dtype

    @property
    def factor(self) -> float:
        """How many times coarser ours is."""
        return float(torch.finfo(self.ours).eps / torch.finfo(self.reference).eps)


def narrow_states(narrow: Reference, ours: OurModel) -> Iterator[NarrowState]:
    """The states of ours, one for each request, that are kept in a narrower dtype than the reference keeps its own."""
    slots = [(layer, name, state) for layer, name, state in ours.loaded.states.named() if _is_slot(state)]
    kept = cache_tensors(narrow.cached(narrow.few_tokens)) if slots else {}
    for layer, name, state in slots:
        size = math.prod(state.axes.values())
        theirs = [t.dtype for t in kept.get(layer, ()) if t.numel() == size and t.is_floating_point()]
        dtype = ours.loaded.dtype if state.dtype in ("cache", "model") else getattr(torch, state.dtype)
        if theirs and all(torch.finfo(dtype).eps > torch.finfo(other).eps for other in theirs):
            yield NarrowState(layer, name, dtype, theirs[0])


def _is_slot(state: Any) -> bool:
    """Whether it is one entry for a request, whatever its length, rather than one for each token."""
    from rtp_runtime.state.descriptors import SlotState

    return isinstance(state, SlotState)


def cache_tensors(cache: Any) -> Mapping[int, list[Tensor]]:
    """Layer -> what a cache of transformers holds of it: in `layers`, or in lists with one entry for each layer."""
    found: dict[int, list[Tensor]] = {}
    if cache is None:
        return found
    layers = list(getattr(cache, "layers", ()))
    for index, layer in enumerate(layers):
        found.setdefault(index, []).extend(tensors_of(vars(layer)))
    for value in vars(cache).values():
        if isinstance(value, list) and len(value) == len(layers):
            for index, item in enumerate(value):
                found.setdefault(index, []).extend(tensors_of(item))
    return found
