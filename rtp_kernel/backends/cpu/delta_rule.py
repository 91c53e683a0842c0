"""The gated delta rule on the CPU: large states are updated where they lie, one request's after another's."""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.delta_rule import Tokens, prefill
from rtp_kernel.registry import OpContext, Support

LARGE = 0x8000
"""Elements of a state from which its passage through memory, not the number of calls, takes the time."""


class InPlaceDeltaRule:
    """Decodes without gathering, copying and scattering states: each is read twice and written twice, in cache."""

    name = "cpu_in_place"

    def supports(self, context: OpContext) -> Support:
        shapes = context.shapes
        size = shapes.get("value heads", 1) * shapes.get("key dim", 1) * shapes.get("value dim", 1)
        return Support.unless(
            context.device != "cpu" and "runs on the CPU only",
            size < LARGE and "small states go faster all at once",
            context.deterministic and "multiplies matrices whose rounding depends on their place in memory",
        )

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: StateView,
        batch: ForwardBatch,
        *,
        scale: float,
        norm_eps: float | None = None,
    ) -> Tensor:
        out = q.new_zeros(v.shape)
        tables, tokens = batch.groups[state.group], Tokens(q, k, v, g, beta)
        assert tables.read is not None and tables.write is not None
        if batch.num_decodes:
            parts = tokens.rows(slice(batch.num_decode_tokens)).prepared(scale, norm_eps)
            copies = [] if tables.snapshots is None else tables.snapshots.tolist()
            slots = zip(
                tables.read.tolist(), tables.write.tolist(), batch.query_lens[: batch.num_decodes], strict=False
            )
            row = 0
            for read, write, length in slots:
                held = state.data[read]
                for _ in range(length):
                    held = step(parts, row, held, state.data[write], out)
                    for slot in (slot for wanted, slot in copies if wanted == row):
                        state.data[slot] = held
                    row += 1
        prefill(tokens, state, batch, out, scale, norm_eps)
        return out


def step(tokens: Tokens, row: int, before: Tensor, after: Tensor, out: Tensor) -> Tensor:
    """One token: from the state `before` to the state `after` (which it returns), both [heads, key dim, value dim]."""
    k = tokens.k[row].unsqueeze(-1)  # [heads, key dim, 1]
    torch.mul(before, tokens.g[row].exp().unsqueeze(-1), out=after)
    known = k.transpose(-1, -2) @ after
    after.baddbmm_(k, (tokens.v[row].unsqueeze(-2) - known) * tokens.beta[row].view(-1, 1, 1))
    out[row] = (tokens.q[row].unsqueeze(-2) @ after).squeeze(-2).to(out.dtype)
    return after
