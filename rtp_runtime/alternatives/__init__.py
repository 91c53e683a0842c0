"""The ways in which decoders write the same thing: packings, rotary layouts, norms, activations, routing.

Pure functions and data. `rtp check` tries each as a mistake, `rtp enable` as what a reference may do.
"""

from __future__ import annotations

from rtp_runtime.alternatives.activations import ACTIVATION_NAMES, alternatives_to
from rtp_runtime.alternatives.norms import EPS_VALUES, NormForm, norm_variants
from rtp_runtime.alternatives.packings import Packing, describe_order, packings, pair_packings
from rtp_runtime.alternatives.rotary import SHARES, THETAS, inverse_turned, turned
from rtp_runtime.alternatives.routing import Routing, routed, routing_variants

__all__ = [
    "ACTIVATION_NAMES",
    "EPS_VALUES",
    "SHARES",
    "THETAS",
    "NormForm",
    "Packing",
    "Routing",
    "alternatives_to",
    "describe_order",
    "inverse_turned",
    "norm_variants",
    "packings",
    "pair_packings",
    "routed",
    "routing_variants",
    "turned",
]
