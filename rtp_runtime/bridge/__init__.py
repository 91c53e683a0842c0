"""Blocks that a model file takes from the installed transformers because no component of ours computes them. Public.

A bridge is one named block, never a decoder layer, a model or a cache: all state stays in our pools, under our
scheduler. It pins the minor version of transformers it was proven with. What a check says of it: the same code as the
reference, of which only state and scheduling were judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rtp_runtime.exports import lazy_names

if TYPE_CHECKING:
    from rtp_runtime.bridge.declarations import bridged_states, bridged_weights
    from rtp_runtime.bridge.listing import bridged_blocks
    from rtp_runtime.bridge.modules import BridgedBlock, BridgedMixer, BridgedRotary
    from rtp_runtime.bridge.target import proven_with

__all__ = [
    "BridgedBlock",
    "BridgedMixer",
    "BridgedRotary",
    "bridged_blocks",
    "bridged_states",
    "bridged_weights",
    "proven_with",
]

__getattr__ = lazy_names(
    __name__,
    {
        "BridgedBlock": "modules",
        "BridgedMixer": "modules",
        "BridgedRotary": "modules",
        "bridged_blocks": "listing",
        "bridged_states": "declarations",
        "bridged_weights": "declarations",
        "proven_with": "target",
    },
)
