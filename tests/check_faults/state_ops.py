"""Ops of indexers, recurrences, compression, routers and residual streams with one fault each.

Each is the plain reference with something changed before or after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops import block_index as blocks
from rtp_kernel.ops import compress, delta_rule, hyper_connection, lightning, moe, norm, selection, token_index
from rtp_kernel.ops import conv as convolution
from rtp_kernel.ops.attention import Span
from rtp_kernel.ops.state import gather_state
from rtp_kernel.registry import OpContext, Support


class FaultyOp:
    """Serves every context with the reference `op`; subclasses change what goes in or comes out."""

    name = "faulty"
    op: ClassVar[Callable[..., Any]]

    def supports(self, context: OpContext) -> Support:
        return Support(True)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return type(self).op(*args, **options)


# Indexers


class NoRelu(FaultyOp):
    """Negative products count too."""

    def __call__(
        self, q: Tensor, weights: Tensor, view: StateView, batch: ForwardBatch, span: Span, **options: Any
    ) -> Tensor:
        out = token_index.index_scores(q, weights, view, batch, span, **options)
        starts = batch.query_start.tolist()
        for request in span.requests:
            rows = range(max(starts[request], span.rows.start), min(starts[request + 1], span.rows.stop))
            part = slice(rows.start - span.rows.start, rows.stop - span.rows.start)
            length = batch.kv_lens[request] // view.tokens_per_entry
            keys = gather_state(view, batch, request, range(length)).float()
            products = torch.matmul(q[part].float(), keys.t()) * options["scale"]
            scores = torch.einsum("nh,nhs->ns", weights[part], products)
            out[part, 0, :length] = scores.where(torch.isfinite(out[part, 0, :length]), float("-inf"))
        return out


class EqualHeads(FaultyOp):
    """Index heads count alike, whatever their weights say."""

    def __call__(self, q: Tensor, weights: Tensor, *args: Any, **options: Any) -> Tensor:
        return token_index.index_scores(q, torch.ones_like(weights), *args, **options)


class SeesOneMore(FaultyOp):
    """Queries choose as if they stood one token later."""

    def __call__(
        self, q: Tensor, weights: Tensor, view: StateView, batch: ForwardBatch, span: Span, **options: Any
    ) -> Tensor:
        later = replace(batch, index=batch.index + 1)
        return token_index.index_scores(q, weights, view, later, span, **options)


class OneLess(FaultyOp):
    """The last of the k best is left out."""

    def __call__(self, scores: Tensor, k: int) -> Tensor:
        return selection.select(scores, k - 1)


class NoLocalBlock(FaultyOp):
    """The block that a query stands in must compete like any other."""

    def __call__(self, *args: Any, **options: Any) -> Tensor:
        return blocks.block_index_scores(*args, **(options | {"local": 0}))


# Recurrences


class GrowingState(FaultyOp):
    """The decay's sign turned: the state grows."""

    def __call__(self, a: Tensor, b: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        g, beta = delta_rule.delta_gates(a, b, *args)
        return -0.1 * g, beta


class NoSoftplus(FaultyOp):
    """The step size is relu, not softplus."""

    def __call__(self, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803
        return -A_log.float().exp() * torch.relu(a.float() + dt_bias), b.sigmoid()


class NoStepBias(FaultyOp):
    """`dt_bias` left out."""

    def __call__(self, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803
        return delta_rule.delta_gates(a, b, A_log, torch.zeros_like(dt_bias))


class OneDecayPerHead(FaultyOp):
    """A decay per channel taken as one per head."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *args: Any, **options: Any) -> Tensor:
        mean = g.mean(dim=-1, keepdim=True).expand_as(g) if g.ndim == 3 else g
        return delta_rule.gated_delta_rule(q, k, v, mean, *args, **options)


def keep_narrow(view: StateView, batch: ForwardBatch) -> None:
    """Round what the step has left in its requests' slots to bfloat16."""
    slots = batch.groups[view.group].write
    assert slots is not None
    view.data[slots] = view.data[slots].bfloat16().to(view.data.dtype)


class NarrowDeltaState(FaultyOp):
    """The recurrent state is kept in bfloat16 from step to step."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: StateView, batch: ForwardBatch,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        out = delta_rule.gated_delta_rule(q, k, v, g, beta, state, batch, **options)
        keep_narrow(state, batch)
        return out


class NarrowLightningState(FaultyOp):
    """The same of lightning attention."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: StateView, batch: ForwardBatch, **options: Any
    ) -> Tensor:
        out = lightning.lightning_attention(q, k, v, slopes, state, batch, **options)
        keep_narrow(state, batch)
        return out


class ForgottenInputs(FaultyOp):
    """A convolution that starts anew in every step."""

    def __call__(self, x: Tensor, weight: Tensor, state: StateView, batch: ForwardBatch, **options: Any) -> Tensor:
        slots = batch.groups[state.group].read
        assert slots is not None
        state.data[slots] = 0
        return convolution.causal_conv(x, weight, state, batch, **options)


class GateFirst(FaultyOp):
    """The gate before the norm."""

    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, **options: Any) -> Tensor:
        ones = torch.full_like(gate, 1.278464542761074)  # where silu is 1
        return norm.gated_rms_norm(x * torch.nn.functional.silu(gate), ones, weight, eps, **options)


# Compression


class NoOverlap(FaultyOp):
    """An entry is made of its own window alone."""

    def __call__(self, kv: Tensor, gate: Tensor, *args: Any, **options: Any) -> Tensor:
        if options["overlap"]:
            half = gate.shape[-1] // 2
            gate = torch.cat((torch.full_like(gate[:, :half], -1e9), gate[:, half:]), dim=-1)
        return compress.compress(kv, gate, *args, **options)


class ShiftedBias(FaultyOp):
    """Each token of a window with the bias of its neighbour."""

    def __call__(self, kv: Tensor, gate: Tensor, bias: Tensor, *args: Any, **options: Any) -> Tensor:
        return compress.compress(kv, gate, bias.roll(1, 0), *args, **options)


class CompressedFault(FaultyOp):
    """Attention to compressed context; subclasses say what is changed."""

    def __call__(self, q: Tensor, kv: StateView, batch: ForwardBatch, span: Span, **options: Any) -> Tensor:
        return compress.compressed_attention(q, kv, batch, span, **options)


class NoSinks(CompressedFault):
    def __call__(self, *args: Any, **options: Any) -> Tensor:
        return super().__call__(*args, **(options | {"sinks": None}))


class EntriesLate(CompressedFault):
    """Entries that are all seen, are seen one token after they are closed."""

    def __call__(self, q: Tensor, kv: StateView, batch: ForwardBatch, span: Span, **options: Any) -> Tensor:
        right = super().__call__(q, kv, batch, span, **options)
        entries = options["entries"]
        if entries is None or options["selection"] is not None:
            return right
        index = batch.index[span.rows.start : span.rows.stop]
        closed = index // entries.tokens_per_entry  # [N]; (index + 1) // ratio are closed
        places = torch.arange(int(closed.max()) + 1 if len(closed) else 0)
        some = torch.where(places < closed[:, None], places, -1)[:, None]
        return super().__call__(q, kv, batch, span, **(options | {"selection": some}))


# Routers


class BestOfGroup(FaultyOp):
    """A group is worth its best expert, not its two best."""

    def __call__(self, logits: Tensor, bias: Tensor | None, **options: Any) -> Any:
        return moe.route(logits, bias, **(options | {"group_score": "max"}))


class BiasInWeights(FaultyOp):
    """The bias that only chooses is in the weights."""

    def __call__(self, logits: Tensor, bias: Tensor | None, **options: Any) -> Any:
        weights, ids = moe.route(logits, bias, **options)
        if bias is None:
            return weights, ids
        scores = torch.sigmoid(logits.float()).gather(-1, ids) + bias.float()[ids]
        return scores / scores.sum(-1, keepdim=True) * options["scale"], ids


class ScaledTwice(FaultyOp):
    def __call__(self, logits: Tensor, bias: Tensor | None, **options: Any) -> Any:
        weights, ids = moe.route(logits, bias, **options)
        return weights * options["scale"], ids


class NotScaled(FaultyOp):
    def __call__(self, logits: Tensor, bias: Tensor | None, **options: Any) -> Any:
        return moe.route(logits, bias, **(options | {"scale": 1.0}))


# Residual streams


class HalfPost(FaultyOp):
    """`post` without its factor 2."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        post, comb, x = hyper_connection.hyper_connection(*args, **options)
        return post / 2, comb, x


class TransposedMix(FaultyOp):
    """Streams mix by comb, not by its transpose."""

    def __call__(self, post: Tensor, comb: Tensor, out: Tensor, streams: Tensor) -> Tensor:
        return hyper_connection.hyper_expand(post, comb.transpose(-1, -2), out, streams)
