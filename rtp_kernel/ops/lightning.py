"""Lightning attention: linear attention whose state decays at a fixed rate per head.

Per token and head, with the state S [key dim, value dim]: S = exp(-slope) S + k v^T; o = S^T q. Nothing is scaled,
normalised or rotated. The state is a `StateView` of [slots, heads, key dim, value dim] in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.state import decode_states, prefill_states

CHUNK = 256
"""Tokens of one parallel chunk, as in the reference."""


def decay_slopes(num_heads: int, layer: int, num_layers: int) -> Tensor:
    """[heads] float32 on the CPU: geometric in the heads, falling with depth to almost nothing (MiniMax-Text-01)."""
    with torch.device("cpu"):
        base = 1 / (2 ** (8 / num_heads))
        return base ** (torch.arange(num_heads) + 1) * (1 - layer / (num_layers - 1 + 1e-5) + 1e-5)


def lightning_attention(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: StateView, batch: ForwardBatch, *, chunk: int = CHUNK
) -> Tensor:
    """q, k [T, heads, key dim], v [T, heads, value dim], slopes [heads] float32 -> [T, heads, value dim] in q's dtype.

    All in float32. Decodes go token by token, all requests at once, prefill by chunks of `chunk` tokens; padding rows
    come out as zeros.
    """
    out = q.new_zeros(v.shape)

    def step(rows: slice | Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        return recurrent(q[rows].float(), k[rows].float(), v[rows].float(), slopes, held)

    def advance(rows: slice | Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        return chunked(q[rows].float(), k[rows].float(), v[rows].float(), slopes, held, chunk)

    decode_states(state, batch, out, step)
    prefill_states(state, batch, out, advance)
    return out


def recurrent(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of N requests: q, k, v [N, heads, dim] and states [N, heads, key dim, value dim], float32."""
    state = state * torch.exp(-slopes)[:, None, None] + k.unsqueeze(-1) * v.unsqueeze(-2)
    return torch.matmul(q.unsqueeze(-2), state).squeeze(-2), state


def chunked(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """L tokens of one request: q, k, v [L, heads, dim] and its state [heads, key dim, value dim], float32."""
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))  # [heads, L, dim]
    length = q.shape[1]
    size = min(chunk, length)
    rate = slopes[:, None, None]
    place = torch.arange(1, size + 1, dtype=torch.float32, device=q.device)
    from_start = torch.exp(-rate * place[:, None])  # [heads, size, 1]: what is left of the state at a token
    apart = place[:, None] - place
    between = torch.exp(-rate * apart.clamp(min=0)).tril()  # [heads, size, size]
    outs = []
    for start in range(0, length, size):
        some = slice(start, min(start + size, length))
        num = some.stop - start
        queries, keys, values = q[:, some], k[:, some], v[:, some]
        inside = torch.matmul(torch.matmul(queries, keys.transpose(1, 2)) * between[:, :num, :num], values)
        outs.append(torch.matmul(queries * from_start[:, :num], state) + inside)
        to_end = between[:, num - 1, :num, None]
        state = state * torch.exp(-rate * num) + torch.matmul((keys * to_end).transpose(1, 2), values)
    return torch.cat(outs, dim=1).transpose(0, 1), state
