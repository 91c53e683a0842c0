"""The recognisers of blocks, in the order in which they are tried for a module of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from rtp_runtime.enable.blocks import Block
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.recognise.attention import is_attention, recognise_attention
from rtp_runtime.enable.recognise.bridge import is_bridgeable, recognise_bridge
from rtp_runtime.enable.recognise.delta_net import is_delta_net, recognise_delta_net
from rtp_runtime.enable.recognise.gated_recurrence import is_gated_recurrence, recognise_gated_recurrence
from rtp_runtime.enable.recognise.lone import (
    is_lone_activation,
    is_lone_linear,
    recognise_lone_activation,
    recognise_lone_linear,
)
from rtp_runtime.enable.recognise.mlp import is_mlp, recognise_mlp
from rtp_runtime.enable.recognise.moe import is_moe, recognise_moe
from rtp_runtime.enable.recognise.norm import is_norm, recognise_norm
from rtp_runtime.enable.recognise.selective import is_selective, recognise_selective
from rtp_runtime.enable.recognise.short_conv import is_short_conv, recognise_short_conv
from rtp_runtime.enable.recognise.state_space import is_state_space, recognise_state_space
from rtp_runtime.enable.recognise.view import View


@dataclass(frozen=True)
class Recogniser:
    """`applies(view, name)`: whether the module may be such a block at all; `recognise` raises UnrecognisedError."""

    applies: Callable[[View, str], bool]
    recognise: Callable[[View, str], Block]


MIXERS: Sequence[Recogniser] = (
    Recogniser(is_attention, recognise_attention),
    Recogniser(is_state_space, recognise_state_space),
    Recogniser(is_selective, recognise_selective),
    Recogniser(is_short_conv, recognise_short_conv),
    Recogniser(is_delta_net, recognise_delta_net),
    Recogniser(is_gated_recurrence, recognise_gated_recurrence),
)
"""Of blocks that mix tokens."""

RECOGNISERS: Sequence[Recogniser] = (
    Recogniser(is_lone_linear, recognise_lone_linear),
    Recogniser(is_lone_activation, recognise_lone_activation),
    Recogniser(is_norm, recognise_norm),
    *MIXERS,
    Recogniser(is_moe, recognise_moe),
    Recogniser(is_mlp, recognise_mlp),
    Recogniser(is_bridgeable, recognise_bridge),
)


def recognise_block(view: View, name: str) -> Block:
    """The block that the module `name` is.

    Raises:
        UnrecognisedError: none; from the first recogniser that it looked right for.
    """
    refusal: UnrecognisedError | None = None
    for recogniser in RECOGNISERS:
        if (view.bridging and recogniser in MIXERS) or not recogniser.applies(view, name):
            continue
        try:
            return recogniser.recognise(view, name)
        except UnrecognisedError as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal
    module: nn.Module = view.module(name)
    inside = sorted({type(part).__name__ for part in module.modules() if part is not module})
    raise UnrecognisedError(
        view.label(name),
        "it is neither attention through the replaceable attention function nor a feed-forward block.",
        f"components, and perhaps state, for what it holds: {', '.join(inside)}",
    )
