"""The ways in which decoders write the same thing: packings, rotary layouts, norms, activations.

Pure functions and data. `rtp check` tries each as a mistake; `rtp enable` takes the numbers that modeling files write.
"""

from __future__ import annotations

from rtp_runtime.alternatives.activations import ACTIVATION_NAMES, alternatives_to
from rtp_runtime.alternatives.norms import EPS_VALUES, NormForm, norm_variants
from rtp_runtime.alternatives.packings import Packing, describe_order, packings, pair_packings
from rtp_runtime.alternatives.rotary import SHARES, THETAS, turned

__all__ = [
    "ACTIVATION_NAMES",
    "EPS_VALUES",
    "SHARES",
    "THETAS",
    "NormForm",
    "Packing",
    "alternatives_to",
    "describe_order",
    "norm_variants",
    "packings",
    "pair_packings",
    "turned",
]
