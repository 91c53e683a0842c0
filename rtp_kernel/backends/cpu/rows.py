"""Forms of the ops whose result for a row is bit-equal whatever the batch, the padding and the chunks.

What changes a row's bits in ordinary forms: matrix kernels chosen by the number of rows; reductions cut by the longest
request; elementwise functions, which torch computes with vector instructions except in the tail of a contiguous run or
of a thread's share. Here every call has a fixed shape, or is small enough for one thread and free of tails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.backends.cpu.linear import PackedLinear, PackedWeight, WidenedLinear, bf16_products, has_onednn, pack
from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops import activation, moe, rotary
from rtp_kernel.ops.activation import OAI_ALPHA
from rtp_kernel.ops.attention import Span, gather_kv, key_bias, request_rows
from rtp_kernel.registry import OpContext, Support

ROWS = 16
"""Rows of a tile of a matrix product."""
KEYS = 64
"""Keys of a tile of attention; tiles start at multiples of it, counted from the request's first token."""
LANES = 64
"""No vector loop of torch takes more elements at once."""
SERIAL = 0x4000
"""Elements up to which torch shares no elementwise work among threads (the least of its limits, that of gelu)."""


class Deterministic:
    def supports(self, context: OpContext) -> Support:
        return Support.unless(
            context.device != "cpu" and "runs on the CPU only",
            not context.deterministic and "slower than the other forms; taken for deterministic only",
        )


def row_chunks(rows: int, width: int) -> Iterator[slice]:
    """Slices of rows of `width` elements that one thread computes without a tail; single rows where that cannot be."""
    step = max(1, SERIAL // width) if width % LANES == 0 else 1
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class GatedActivation(Deterministic):
    """The reference in contiguous chunks of rows (torch computes gelu of strided rows by another formula)."""

    name = "cpu_row_chunks"

    def __call__(
        self, gate: Tensor, up: Tensor, name: str = "silu", limit: float | None = None, alpha: float = OAI_ALPHA
    ) -> Tensor:
        parts = [
            activation.gated_activation(gate[rows].contiguous(), up[rows], name, limit, alpha)
            for rows in row_chunks(len(gate), gate.shape[-1])
        ]
        return torch.cat(parts) if parts else torch.zeros_like(gate)


class Activation(Deterministic):
    """The reference in contiguous chunks of rows."""

    name = "cpu_row_chunks"

    def __call__(self, x: Tensor, name: str) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        parts = [activation.activation(flat[rows].contiguous(), name) for rows in row_chunks(*flat.shape)]
        return torch.cat(parts).view_as(x) if parts else torch.zeros_like(x)


class RotaryAngles(Deterministic):
    """The reference in chunks of rows."""

    name = "cpu_row_chunks"

    def __call__(
        self,
        positions: Tensor,
        inv_freq: Tensor,
        attention_factor: float,
        dtype: torch.dtype,
        axes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        width = 2 * inv_freq.shape[0]
        slices = list(row_chunks(positions.shape[-1], width)) or [slice(0, 0)]
        parts = [rotary.rotary_angles(positions[..., rows], inv_freq, attention_factor, dtype, axes) for rows in slices]
        return torch.cat([cos for cos, _ in parts]), torch.cat([sin for _, sin in parts])


class Route(Deterministic):
    """The reference in chunks of rows."""

    name = "cpu_row_chunks"

    def __call__(
        self, logits: Tensor, bias: Tensor | None, *, ids: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        slices = list(row_chunks(*logits.shape)) or [slice(0, 0)]
        parts = [moe.route(logits[rows], bias, ids=None if ids is None else ids[rows], **options) for rows in slices]
        return torch.cat([weights for weights, _ in parts]), torch.cat([ids for _, ids in parts])


class TiledLinear(Deterministic):
    """Products of `ROWS` rows at a time, the last tile padded; on packed weights where oneDNN is there."""

    name = "cpu_row_tiles"

    def prepare(self, weight: Tensor) -> Tensor | PackedWeight:
        """Packed where oneDNN is there; the logical weight is then not read again."""
        if not has_onednn():
            return weight
        wide = weight.dtype == torch.bfloat16 and not bf16_products()
        return PackedWeight(pack(weight.float() if wide else weight), None)

    def prepared_bytes(self, weight: Tensor) -> int:
        """What `prepare` adds to the memory that is taken."""
        return weight.numel() * 4

    def release(self, prepared: Tensor | PackedWeight) -> Tensor | PackedWeight:
        """Itself: what is packed holds nothing of the logical weight."""
        return prepared

    def restore(self, prepared: Tensor | PackedWeight, dtype: torch.dtype) -> Tensor:
        """The logical weight, bit for bit."""
        return prepared if isinstance(prepared, Tensor) else self._form(dtype).restore(prepared, dtype)

    def _form(self, dtype: torch.dtype) -> PackedLinear | WidenedLinear:
        return WidenedLinear() if dtype == torch.bfloat16 and not bf16_products() else PackedLinear()

    def __call__(self, x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        form = self._form(x.dtype)
        padded = functional.pad(flat, (0, 0, 0, -len(flat) % ROWS))
        parts = [form(padded[start : start + ROWS], weight, bias) for start in range(0, len(flat), ROWS)]
        out = torch.cat(parts)[: len(flat)] if parts else form(flat, weight, bias)
        return out.view(*x.shape[:-1], out.shape[-1])


class TiledGroups(Deterministic):
    """Each group's product in tiles of rows."""

    name = "cpu_row_tiles"

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        product, matrices = TiledLinear(), weight.view(x.shape[-2], -1, x.shape[-1])
        return torch.stack([product(x[..., group, :], matrix) for group, matrix in enumerate(matrices)], dim=-2)


class TiledExperts(Deterministic):
    """Expert after expert, in rising id, each product in tiles of rows."""

    name = "cpu_row_tiles"

    def __call__(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *,
        activation: str = "silu",
        limit: float | None = None,
        alpha: float = OAI_ALPHA,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        product, gated = TiledLinear(), GatedActivation()
        out = torch.zeros_like(x)
        for expert in torch.unique(ids).tolist():
            rows, places = torch.where(ids == expert)
            gate, up = product(x[rows], gate_up[expert], moe.of_expert(gate_up_bias, expert)).chunk(2, dim=-1)
            result = product(gated(gate, up, activation, limit, alpha), down[expert], moe.of_expert(down_bias, expert))
            result = result * weights[rows, places, None]
            out.index_add_(0, rows, result.to(out.dtype))
        return out


class TiledAttention(Deterministic):
    """Padded tiles of queries over tiles of keys that start at multiples of `KEYS`; sums run from tile to tile.

    A tile in which a query sees nothing adds exact zeros, so neither the request's length nor its chunks change a
    query's result.
    """

    name = "cpu_key_tiles"

    def supports(self, context: OpContext) -> Support:
        selects = bool(context.options.get("selects")) and "attends to every token that is visible"
        return Support.unless(*super().supports(context).reasons, selects)

    def __call__(
        self,
        q: Tensor,
        kv: StateView,
        batch: ForwardBatch,
        span: Span,
        *,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
        soft_cap: float | None = None,
        slopes: Tensor | None = None,
        slope_scale: float = 1.0,
        plan: Any = None,
    ) -> Tensor:
        out = torch.zeros_like(q)
        queries = _queries_per_tile(q.shape[1])
        for request, rows in request_rows(batch, span):
            end = batch.kv_lens[request]
            start = end - len(rows)
            first = 0 if window is None else max(0, start - window + 1) // KEYS * KEYS
            held = first if window is None else max(0, start - window + 1)
            keys, values = (_padded(part, held - first) for part in gather_kv(kv, batch, request, range(held, end)))
            for row in range(0, len(rows), queries):
                index = torch.arange(start + row, start + row + queries).clamp(max=end - 1)
                tile = q[rows.start + index - start].float()
                biases = None if slopes is None else _bias_tiles(slopes, keys, first, slope_scale)
                result = _attend_tile(tile, index, keys, values, first, scale, window, sinks, soft_cap, biases)
                part = slice(rows.start + row, min(rows.start + row + queries, rows.stop))
                out[part] = result[: part.stop - part.start].to(out.dtype)
        return out


def _queries_per_tile(heads: int) -> int:
    """A power of two, small enough that one thread computes the exponentials of a tile of keys."""
    most = max(1, SERIAL // (heads * KEYS))
    return min(ROWS, 1 << (most.bit_length() - 1))


def _padded(part: Tensor, before: int) -> Tensor:
    """[tokens, kv, D] -> [tiles, kv, KEYS, D] float32, `before` rows of zeros in front, zeros behind."""
    wide = functional.pad(part.float(), (0, 0, 0, 0, before, -(before + len(part)) % KEYS))
    return wide.unflatten(0, (-1, KEYS)).transpose(1, 2).contiguous()  # type: ignore[no-untyped-call, no-any-return]


def _bias_tiles(slopes: Tensor, keys: Tensor, first: int, scale: float) -> Tensor:
    """What slopes [heads] add to the scores of tiles of keys from token `first` on -> [tiles, kv, group, KEYS]."""
    tokens = torch.arange(first, first + len(keys) * KEYS)
    return key_bias(slopes, tokens, scale).view(keys.shape[1], -1, len(keys), KEYS).permute(2, 0, 1, 3)


def _attend_tile(
    q: Tensor,
    index: Tensor,
    keys: Tensor,
    values: Tensor,
    first: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    soft_cap: float | None,
    biases: Tensor | None = None,
) -> Tensor:
    """q [N, heads, D] at indices [N] over keys, values [tiles, kv, KEYS, D] from token `first` on -> [N, heads, D]."""
    num, heads, dim = q.shape
    num_kv = keys.shape[1]
    grouped = q.view(num, num_kv, -1, dim).transpose(0, 1).reshape(num_kv, -1, dim)  # [kv, N * group, D]
    seen = index.repeat_interleave(heads // num_kv)[:, None]  # [N * group, 1]
    scores = []
    for place, tile in enumerate(keys):
        score = torch.bmm(grouped, tile.transpose(1, 2).contiguous()) * scale
        if soft_cap is not None:
            score = soft_cap * torch.tanh(score / soft_cap)
        if biases is not None:  # rows are queries, and of each the heads of a group
            score = score + biases[place].repeat(1, num, 1)
        token = torch.arange(KEYS) + (first + place * KEYS)
        hidden = token > seen if window is None else (token > seen) | (token <= seen - window)
        scores.append(score.masked_fill(hidden, float("-inf")))
    if sinks is not None:
        extra = torch.full_like(scores[0], float("-inf"))
        extra[..., 0] = sinks.float().view(num_kv, 1, -1).expand(num_kv, num, -1).flatten(1)
        scores.append(extra)
    mixed = _softmax_tiles(scores, values)
    return mixed.view(num_kv, num, -1, dim).transpose(0, 1).reshape(num, heads, dim)


def _softmax_tiles(scores: Sequence[Tensor], values: Tensor) -> Tensor:
    """Tiles of scores [kv, rows, KEYS] over tiles of values [tiles, kv, KEYS, D] (a tile more of scores has none)."""
    top = torch.stack([score.amax(-1) for score in scores]).amax(0)[..., None]
    total, mixed = torch.zeros_like(top), torch.zeros(())
    for score, value in zip_longest(scores, values):
        exps = torch.exp(score - top)
        total = total + exps.sum(-1, keepdim=True)
        if value is not None:
            mixed = mixed + torch.bmm(exps, value)
    return mixed / total
