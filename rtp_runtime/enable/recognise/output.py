"""What stands between attention and its output projection: gates and norms, by hypothesis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from rtp_kernel.ops.activation import ACTIVATIONS
from rtp_runtime.enable.blocks.attention import OutputGate
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import same
from rtp_runtime.enable.recognise.mlp import gives
from rtp_runtime.enable.recognise.norm import recognise_norm
from rtp_runtime.enable.recognise.paths import Tracer
from rtp_runtime.enable.recognise.view import View, is_linear, linears, projection_of, rows
from rtp_runtime.enable.recording import AttentionCall, Call

GATES = ("sigmoid", "silu", "tanh", "relu")


def recognise_output(view: View, name: str, inside: str, call: AttentionCall, calls: Sequence[Call]) -> dict[str, Any]:
    """The fields `out`, `gate` and `out_norm` of the block `name`, whose module `inside` attends.

    Raises:
        UnrecognisedError: another step stands between.
    """
    attended = rows(call.output)
    for out in [each for each in linears(calls) if each.outputs and each.inputs[0].numel() == attended.numel()]:
        if gives(view.recording.of(name), rows(out.outputs[0])):
            fields = _between(view, inside, call, calls, attended, rows(out.inputs[0]))
            if fields is not None:
                return {"out": projection_of(out, inside, 0, out.outputs[0].shape[-1]), **fields}
    raise UnrecognisedError(
        view.label(name),
        "what attention returns does not go through a gate, a norm and one output projection.",
        "the steps between",
    )


def _between(
    view: View, inside: str, call: AttentionCall, calls: Sequence[Call], attended: Tensor, wanted: Tensor
) -> dict[str, Any] | None:
    if same(attended, wanted):
        return {}
    for fields, found in _normed(view, inside, calls, attended):
        if same(found, wanted):
            return fields
    for gate, gated in _gated(view, inside, call, calls, attended):
        if same(gated, wanted):
            return {"gate": gate}
        for fields, found in _normed(view, inside, calls, gated):
            if same(found, wanted):
                return {"gate": gate, **fields}
    return None


def _normed(view: View, inside: str, calls: Sequence[Call], x: Tensor) -> Iterator[tuple[dict[str, Any], Tensor]]:
    for call in calls:
        if is_linear(call.module) or not call.inputs or call.inputs[0].numel() != x.numel() or not call.outputs:
            continue
        whole = call.inputs[0].shape[-1] == x.shape[-1]
        if whole and same(rows(call.inputs[0]), x):
            yield (
                {"out_norm": (call.name.removeprefix(f"{inside}."), recognise_norm(view, call.name))},
                rows(call.outputs[0]),
            )


def _gated(
    view: View, inside: str, call: AttentionCall, calls: Sequence[Call], x: Tensor
) -> Iterator[tuple[OutputGate, Tensor]]:
    tracer = Tracer(view, inside, calls)
    heads, dim = call.query.shape[1], call.query.shape[3]
    for projection, out in tracer.slices(x.shape[-1], dim):
        for name in GATES:
            yield OutputGate(projection, name), ACTIVATIONS[name](out) * x
    for each in linears(calls):
        out = rows(each.outputs[0])
        if out.shape[-1] == heads:
            projection = projection_of(each, inside, 0, heads)
            for name in GATES:
                factor = ACTIVATIONS[name](out).repeat_interleave(dim, dim=-1)
                yield OutputGate(projection, name, per_head=True), factor * x
