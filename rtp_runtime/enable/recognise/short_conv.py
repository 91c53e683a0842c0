"""Short gated convolutions: a projection in three parts, two of them multiplied and convolved, the third a gate."""

from __future__ import annotations

import torch

from rtp_runtime.enable.blocks.convolution import ShortConv
from rtp_runtime.enable.match import same
from rtp_runtime.enable.recognise.mixer import find_mixer, has_convolution
from rtp_runtime.enable.recognise.view import View


def is_short_conv(view: View, name: str) -> bool:
    """Whether it holds a convolution and no parameters of its own."""
    return has_convolution(view, name) and not list(view.module(name).named_parameters(recurse=False))


@torch.no_grad()
def recognise_short_conv(view: View, name: str) -> ShortConv:
    """The block out(gate * conv(b * x)) that the module `name` is.

    Raises:
        UnrecognisedError: it computes something else.
    """
    mixer = find_mixer(view, name)
    width, channels = mixer.projected.shape[-1], mixer.conv.weight.shape[0]
    if width != 3 * channels or mixer.factor != 1.0 or mixer.others():
        raise mixer.refuse("its projection is not three parts as wide as its convolution.", "a component for it")
    parts = torch.split(mixer.projected, channels, dim=-1)
    for gate in (1, 0, 2):
        rest = [place for place in range(3) if place != gate]
        product = parts[rest[0]] * parts[rest[1]]
        for activation in mixer.activations():
            if same(parts[gate] * mixer.convolved(product, activation), mixer.wanted):
                order = ["gate"] * 3
                order[rest[0]], order[rest[1]] = "b", "x"
                first, last = mixer.projection(mixer.first), mixer.projection(mixer.last)
                return ShortConv(type(mixer.module).__name__, first, mixer.conv_block(activation), last, tuple(order))
    raise mixer.refuse("no order of its three parts gives its output.", "a component for it")
