"""A decoder layer as a straight-line program: which sums of earlier values each of its blocks is given."""

from __future__ import annotations

from torch import Tensor, nn

from rtp_runtime.enable.findings import Layer, Norm, Step, UnrecognisedError
from rtp_runtime.enable.match import combination
from rtp_runtime.enable.recognise.norm import recognise_norm
from rtp_runtime.enable.recognise.view import View, leaf, linears
from rtp_runtime.enable.recording import Call


def recognise_layer(view: View, name: str) -> Layer:
    """The order of norms, attention, feed-forward and residual sums in the decoder layer `name`.

    Raises:
        UnrecognisedError: a block of another kind, or a step that is no sum.
    """
    call = view.recording.of(name)
    children = [child for child in view.recording.children(name) if not _passes(child)]
    attention = [child for child in children if child.name in view.recording.attention]
    mlps = [child for child in children if child not in attention and linears(view.recording.children(child.name))]
    others = [child for child in children if child not in attention and child not in mlps]
    _check_blocks(view, name, attention, mlps, children)
    norms: dict[str, Norm] = {leaf(child.name): recognise_norm(view, child.name) for child in others}
    values: dict[str, Tensor] = {"hidden": call.inputs[0]}
    steps = []
    for child in children:
        steps.append(Step(leaf(child.name), _sum(view, child.name, child.inputs[0], values)))
        values[leaf(child.name)] = child.outputs[0]
    output = _sum(view, name, call.outputs[0], values)
    return Layer(
        type(view.module(name)).__name__, leaf(attention[0].name), leaf(mlps[0].name), norms, tuple(steps), output
    )


def _passes(call: Call) -> bool:
    """Dropout in eval mode, identities."""
    return isinstance(call.module, nn.Dropout | nn.Identity)


def _sum(view: View, name: str, wanted: Tensor, values: dict[str, Tensor]) -> dict[str, float]:
    found = combination(wanted, values)
    if found is None:
        raise UnrecognisedError(
            view.label(name),
            f"it is given (or gives) no sum of {', '.join(values)}.",
            "the steps between written by hand",
        )
    return found


def _check_blocks(view: View, name: str, attention: list[Call], mlps: list[Call], children: list[Call]) -> None:
    for child in children:
        if child in attention or child in mlps:
            continue
        if list(child.module.children()):
            inside = sorted({type(module).__name__ for module in child.module.modules() if module is not child.module})
            raise UnrecognisedError(
                view.label(child.name),
                "it is neither attention through the replaceable attention function nor a feed-forward block.",
                f"components, and perhaps state, for what it holds: {', '.join(inside)}",
            )
    own = [parameter for parameter, _ in view.module(name).named_parameters(recurse=False)]
    if own:
        raise UnrecognisedError(
            view.label(name), f"it holds parameters of its own ({', '.join(own)}).", "those steps by hand"
        )
    if len(attention) != 1 or len(mlps) != 1:
        raise UnrecognisedError(
            view.label(name), f"it has {len(attention)} attention and {len(mlps)} feed-forward blocks.", "one of each"
        )
