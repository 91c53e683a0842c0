"""Attention over a cache of latents: keys and values are linear images of one vector per token (DeepSeek's MLA).

A paged state holds [blocks, entries, R + Dr]: the latent [R], then the rotated key [Dr] that all heads share (Dr may be
0). The up-projection `up` [heads, Dn + Dv, R] makes of a latent each head's key [Dn] and value [Dv].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.attention import Span, request_rows
from rtp_kernel.ops.selection import selected
from rtp_kernel.ops.state import gather_state


@dataclass(frozen=True, slots=True)
class LatentDims:
    """The sizes of a head, as the tensors of a call show them."""

    latent: int
    rope: int
    nope: int
    value: int

    @staticmethod
    def of(q: Tensor, up: Tensor, view: StateView) -> LatentDims:
        """From q [N, heads, Dn + Dr], up [heads, Dn + Dv, R] and the state."""
        latent = up.shape[-1]
        rope = view.data.shape[-1] - latent
        nope = q.shape[-1] - rope
        return LatentDims(latent, rope, nope, up.shape[1] - nope)


def latent_attention(
    q: Tensor,
    view: StateView,
    batch: ForwardBatch,
    span: Span,
    up: Tensor,
    *,
    scale: float,
    absorbed: bool = False,
    selection: Tensor | None = None,
    plan: Any = None,
) -> Tensor:
    """Attention of the span's rows q [N, heads, Dn + Dr] over their requests' latents, as written -> [N, heads, Dv].

    Expanded, keys and values of all tokens are made first, in the model's dtype as the reference does. `absorbed` moves
    the up-projection to the query and to the result instead: the same sums in another order, cheaper for few queries.
    `selection` [N, 1, k] restricts each row to these token indices (-1 = none); a row that sees nothing gives zeros.
    Scores and sums are float32.
    """
    dims = LatentDims.of(q, up, view)
    out = q.new_zeros(*q.shape[:2], dims.value)
    attend = attend_absorbed if absorbed else attend_expanded
    for request, rows in request_rows(batch, span):
        latents = gather_state(view, batch, request, range(batch.kv_lens[request]))  # [S, R + Dr]
        index = batch.index[rows.start + span.rows.start : rows.stop + span.rows.start]
        part = slice(rows.start, rows.stop)
        visible = torch.arange(len(latents), device=q.device) <= index[:, None]  # [rows, S]
        if selection is not None:
            visible &= selected(selection[part], len(latents))[:, 0]
        out[part] = attend(q[part], latents, up, visible, scale)
    return out


def attend_expanded(q: Tensor, latents: Tensor, up: Tensor, visible: Tensor, scale: float) -> Tensor:
    """q [N, heads, Dn + Dr] over latents [S, R + Dr] by each head's keys and values -> [N, heads, Dv]."""
    keys, values = expand(latents.to(q.dtype), up, q.shape[-1])
    scores = torch.einsum("nad,sad->nas", q.float(), keys.float()) * scale
    return torch.einsum("nas,sad->nad", _weights(scores, visible), values.float()).to(q.dtype)


def attend_absorbed(q: Tensor, latents: Tensor, up: Tensor, visible: Tensor, scale: float) -> Tensor:
    """The same by one key and value for all heads, the latent, with the up-projection moved to both ends."""
    rank = up.shape[-1]
    nope = q.shape[-1] - (latents.shape[-1] - rank)
    keys = torch.cat((torch.einsum("nad,adr->nar", q[..., :nope].float(), up[:, :nope].float()), q[..., nope:]), -1)
    scores = torch.einsum("nar,sr->nas", keys, latents.float()) * scale
    mixed = torch.einsum("nas,sr->nar", _weights(scores, visible), latents[:, :rank].float())
    return torch.einsum("nar,adr->nad", mixed, up[:, nope:].float()).to(q.dtype)


def expand(latents: Tensor, up: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """Keys [S, heads, Dn + Dr] and values [S, heads, Dv] of latents [S, R + Dr]; the rotated part is shared."""
    heads, _, rank = up.shape
    shared = latents[:, None, rank:].expand(-1, heads, -1)  # [S, heads, Dr]
    nope = key_dim - shared.shape[-1]
    both = functional.linear(latents[:, :rank], up.flatten(0, 1)).view(len(latents), heads, -1)  # [S, heads, Dn + Dv]
    return torch.cat((both[..., :nope], shared), dim=-1), both[..., nope:]


def _weights(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax of scores [N, heads, S] over visible [N, S]; zeros for a row that sees nothing."""
    weights = torch.softmax(scores.masked_fill(~visible[:, None], float("-inf")), dim=-1)
    return weights.masked_fill(~visible.any(-1)[:, None, None], 0.0)
