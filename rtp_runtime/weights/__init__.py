"""Weights: what a model declares of them, and from that the audit, the plan, the load and the export.

The descriptors import no torch; what executes them is in the submodules.
"""

from rtp_runtime.weights.descriptors import (
    Axis,
    Concat,
    Descriptor,
    FromCheckpoint,
    Interleave,
    Layout,
    Permute,
    Reshape,
    Skip,
    Source,
    Split,
    Stack,
    Tie,
    Weight,
    WeightDescriptors,
)
from rtp_runtime.weights.naming import renamed

__all__ = [
    "Axis",
    "Concat",
    "Descriptor",
    "FromCheckpoint",
    "Interleave",
    "Layout",
    "Permute",
    "Reshape",
    "Skip",
    "Source",
    "Split",
    "Stack",
    "Tie",
    "Weight",
    "WeightDescriptors",
    "renamed",
]
