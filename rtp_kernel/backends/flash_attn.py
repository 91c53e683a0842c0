"""Paged attention on CUDA through flash-attn (its `cute` interface), where that is installed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.attention import Span
from rtp_kernel.registry import OpContext, Support

MAX_HEAD_DIM = 256


@cache
def is_installed() -> bool:
    """Whether flash-attn with its `cute` interface can be imported; nothing is imported for the answer."""
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None


def page_reason(head_dim: int, block_size: int) -> str | None:
    """Why pages of `block_size` tokens cannot be read, if they cannot.

    A page of exactly one key tile (128) is loaded whole, past the request's end, where memory may hold NaN.
    """
    if block_size == 0:
        return "needs one block size for all states, known when the model is loaded"
    if head_dim == 128 and block_size % 16 == 0 and block_size != 128:
        return None
    if block_size == 64:
        return None
    sizes = "16, 32 or 64" if head_dim == 128 else "64"
    return f"reads blocks of {sizes} tokens at head dim {head_dim}, not {block_size}: set block_size"


@dataclass(frozen=True, slots=True)
class Call:
    """The span as flash-attn wants it."""

    cu_seqlens: Tensor
    """[requests + 1] int32: first row of each request among the span's rows."""
    seq_lens: Tensor
    """[requests] int32: keys of each request."""
    block_table: Tensor
    """[requests, blocks] int32."""
    num_rows: int
    """Rows that belong to requests; padding follows."""
    max_query_len: int


class FlashAttention:
    """Decode, verification and prefill in one call each, sinks and soft cap included."""

    name = "flash_attn"

    def supports(self, context: OpContext) -> Support:
        head_dim = context.shapes.get("head dim", 0)
        return Support.unless(
            context.device != "cuda" and "runs on CUDA only",
            not is_installed() and "flash-attn is not installed: pip install rtp-runtime[cuda]",
            context.dtype not in (torch.float16, torch.bfloat16) and f"has float16 and bfloat16, not {context.dtype}",
            (head_dim % 8 != 0 or head_dim > MAX_HEAD_DIM) and f"head dim {head_dim}: a multiple of 8 up to 256",
            page_reason(head_dim, context.block_size),
            bool(context.options.get("selects")) and "attends to every token that is visible",
            context.options.get("alibi") is not None and "has no slopes",
            context.deterministic and "its result for a row depends on how keys are split among blocks of threads",
        )

    def plan(self, batch: ForwardBatch, kv: StateView, span: Span, window: int | None) -> Call:
        assert page_reason(kv.data.shape[-1], kv.data.shape[1]) is None, "loaded for another block size"
        requests = slice(span.requests.start, span.requests.stop)
        table = batch.groups[kv.group].block_table
        assert table is not None
        starts = batch.query_start[requests.start : requests.stop + 1] - span.rows.start
        lens = batch.query_lens[requests]
        return Call(
            starts.to(torch.int32),
            batch.seq_lens[requests].to(torch.int32),
            table[requests].to(torch.int32).contiguous(),
            sum(lens),
            max(lens, default=0),
        )

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
        plan: Call | None = None,
    ) -> Tensor:
        call = self.plan(batch, kv, span, window) if plan is None else plan
        out = torch.zeros_like(q)
        if call.num_rows == 0:
            return out
        keys, values = kv.data.unbind(2)  # each [blocks, entries, kv heads, D]
        attended: Any = import_module("flash_attn.cute").flash_attn_varlen_func(
            q[: call.num_rows].contiguous(),
            keys,
            values,
            cu_seqlens_q=call.cu_seqlens,
            max_seqlen_q=call.max_query_len,
            seqused_k=call.seq_lens,
            page_table=call.block_table,
            softmax_scale=scale,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
            learnable_sink=None if sinks is None else sinks.to(q.dtype),
            softcap=soft_cap or 0.0,
        )
        out[: call.num_rows] = attended[0] if isinstance(attended, tuple) else attended
        return out
