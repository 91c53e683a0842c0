"""Selection on the CPU without sorting every place."""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.ops import selection
from rtp_kernel.registry import OpContext, Support

MIN_PLACES_PER_CHOICE = 4
"""Below this many places for each that is chosen, sorting them all is as fast."""


class Select:
    """Finds the score of the last place chosen, then sorts the chosen ones alone. The very result of the reference."""

    name = "cpu_partition"

    def supports(self, context: OpContext) -> Support:
        return Support.unless(context.device != "cpu" and "runs on the CPU only")

    def __call__(self, scores: Tensor, k: int) -> Tensor:
        places = scores.shape[-1]
        if k * MIN_PLACES_PER_CHOICE > places or scores.numel() == 0:
            return selection.select(scores, k)
        last = scores.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
        above, tied = scores > last, scores == last
        wanted = k - above.sum(-1, keepdim=True)  # of those that tie, the first so many
        if bool((tied.sum(-1, keepdim=True) != wanted).any()):
            tied &= tied.cumsum(-1) <= wanted
        kept = above.logical_or_(tied).nonzero()[:, -1]
        if len(kept) != k * scores.numel() // places:  # NaN is above nothing and equal to nothing
            return selection.select(scores, k)
        kept = kept.view(*scores.shape[:-1], k)  # by rising place
        values, order = torch.sort(scores.gather(-1, kept), dim=-1, descending=True, stable=True)
        return kept.gather(-1, order).masked_fill_(values == float("-inf"), -1)
