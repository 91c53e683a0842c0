"""The output of a fused linear, split into the outputs of the checkpoint tensors it was fused from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rtp_runtime.errors import NotJudgedError
from rtp_runtime.weights.descriptors import Source
from rtp_runtime.weights.operations import cut, invert, leaves, shape

if TYPE_CHECKING:
    from torch import Tensor


def split_output(source: Source, output: Tensor) -> dict[str, Tensor]:
    """Checkpoint tensor -> the part of `output` [..., out] that its rows compute, in the order of those rows.

    `source` is the lowered tree of a weight [out, in] or a bias [out] (`Parameter.source`): where a row went is where
    its output is. Raises NotJudgedError when outputs do not belong to single tensors, as for stacked experts or tensors
    joined along the input.
    """
    import torch

    made = shape(source)
    if len(made) not in (1, 2) or made[0] != output.shape[-1]:
        raise NotJudgedError(f"An output {list(output.shape)} is not that of a linear whose weight is {list(made)}.")
    column = source if len(made) == 1 else cut(source, ((0, made[0]), (0, 1)))
    if {leaf.name for leaf in leaves(column)} != {leaf.name for leaf in leaves(source)}:
        raise NotJudgedError("Tensors joined along the input add up in each output; they cannot be told apart there.")
    places = torch.arange(made[0], device=output.device).view(shape(column))
    found: dict[str, list[tuple[tuple[tuple[int, int], ...], Tensor]]] = {}
    for leaf, view in invert(column, places):
        found.setdefault(leaf.name, []).append((leaf.region, view.flatten()))
    return {
        name: output[..., torch.cat([rows for _, rows in sorted(parts, key=lambda part: part[0])])]
        for name, parts in found.items()
    }
