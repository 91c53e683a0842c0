"""Attention that a modeling file writes out: found again in its products and softmaxes.

What was handed to softmax is fitted as a scale times the products of queries and keys, plus a slope per head times the
key's position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rtp_runtime.enable.recording import AttentionCall, FunctionCall

HIDDEN = -5e3
"""Scores below this are masked: modeling files write -1e4, the smallest float or -inf."""
FIT = 1e-4
"""Relative error up to which scores are the fitted formula's."""


def written_out(functions: Sequence[FunctionCall], known: Sequence[str]) -> Iterator[AttentionCall]:
    """The attention of every module, other than the `known`, whose softmax stands between two products."""
    for place, call in enumerate(functions):
        if call.function != "softmax" or call.module in known or call.output.ndim < 3:
            continue
        inside = [other for other in functions if other.module == call.module]
        if sum(other.function == "softmax" for other in inside) != 1:
            continue
        before = [other for other in functions[:place] if other.module == call.module]
        after = [other for other in functions[place:] if other.module == call.module]
        found = _attention(call, before, after)
        if found is not None:
            yield found


def _attention(
    softmax: FunctionCall, before: Sequence[FunctionCall], after: Sequence[FunctionCall]
) -> AttentionCall | None:
    tokens = softmax.output.shape[-1]
    if softmax.output.shape[-2] != tokens:
        return None
    first = next((call for call in reversed(before) if call.output.numel() == softmax.output.numel()), None)
    second = next((call for call in after if len(call.inputs) >= 2 and call.output.shape[-2] == tokens), None)
    if first is None or second is None or second.inputs[0].numel() != softmax.output.numel():
        return None
    query, key = (_four_axes(part) for part in first.inputs[-2:])
    value, output = _four_axes(second.inputs[1]), _four_axes(second.output)
    if key.shape[2] != query.shape[3] or query.shape[2] != tokens:
        return None
    key = _distinct(key.transpose(2, 3))
    value = _distinct(value)
    if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
        return None
    scores = _four_axes(softmax.inputs[0]).float()
    visible = scores > HIDDEN
    if not bool((visible == visible[:, :1]).all()):
        return None
    fitted = _fit(query, key, scores, visible[:, :1])
    if fitted is None:
        return None
    scale, slopes = fitted
    options = {"scaling": scale} | ({} if slopes is None else {"slopes": slopes})
    return AttentionCall(softmax.module, query, key, value, visible[:, :1], options, output.transpose(1, 2))


def _four_axes(tensor: Tensor) -> Tensor:
    """[heads, a, b] or [1, heads, a, b] -> [1, heads, a, b]."""
    return tensor.reshape(1, -1, *tensor.shape[-2:])


def _distinct(heads: Tensor) -> Tensor:
    """Keys or values [1, heads, tokens, dim], each once where runs of heads share one."""
    total = heads.shape[1]
    for count in range(1, total):
        if total % count == 0:
            runs = heads.reshape(1, count, total // count, *heads.shape[2:])
            if torch.equal(runs, runs[:, :, :1].expand_as(runs)):
                return runs[:, :, 0]
    return heads


def _fit(query: Tensor, key: Tensor, scores: Tensor, visible: Tensor) -> tuple[float, Tensor | None] | None:
    """The scale of the products, and the slopes [heads] of the keys' positions, None where they are flat."""
    groups = query.shape[1] // key.shape[1]
    products = query.double() @ key.double().repeat_interleave(groups, dim=1).transpose(2, 3)
    place = torch.arange(scores.shape[-1], dtype=torch.float64).expand_as(products)
    seen = visible.double()
    count = seen.sum(-1, keepdim=True)

    def centred(x: Tensor) -> Tensor:
        """Without what is the same for all keys of a query, which softmax does not see."""
        return (x - (x * seen).sum(-1, keepdim=True) / count) * seen

    wanted = centred(torch.where(visible, scores.double(), 0.0))
    columns = torch.stack((centred(products), centred(place)), dim=-1)[0].flatten(1, 2)  # [heads, pairs, 2]
    solution = torch.linalg.lstsq(columns, wanted[0].flatten(1)[..., None]).solution
    error = (columns @ solution)[..., 0] - wanted[0].flatten(1)
    if float(error.abs().max()) > FIT * float(wanted.abs().max()):
        return None
    scales, slopes = solution[:, 0, 0], solution[:, 1, 0]
    if float((scales - scales[0]).abs().max()) > FIT * float(scales[0].abs()):
        return None
    flat = float(slopes.abs().max()) < 1e-5
    return float(scales.mean()), None if flat else slopes.float()
