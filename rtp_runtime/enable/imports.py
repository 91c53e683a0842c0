"""The import block of a model file: only what its body uses."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rtp_runtime.enable.code import from_import

IMPORTS: Mapping[str, tuple[str, ...]] = {
    "collections.abc": ("Mapping", "Sequence"),
    "typing": ("Any",),
    "rtp_kernel.batch": ("Build", "ForwardBatch", "ModelState", "StateView"),
    "rtp_kernel.components": (
        "XIELU",
        "Activation",
        "Attention",
        "CausalConv",
        "DeltaGates",
        "Embedding",
        "Experts",
        "Gate",
        "GatedDeltaRule",
        "GatedMLP",
        "GatedRMSNorm",
        "LayerNorm",
        "Linear",
        "LinearRecurrence",
        "MergedLinear",
        "RMSNorm",
        "RopeParameters",
        "Rotary",
        "RotaryEmbedding",
        "SinusoidalEmbedding",
        "SelectiveScan",
        "StateSpaceScan",
        "TopKRouter",
        "parameter",
    ),
    "rtp_kernel.ops.activation": ("activation", "gated_activation"),
    "rtp_kernel.registry": ("Support",),
    "rtp_runtime.bridge": (
        "BridgedBlock",
        "BridgedMixer",
        "BridgedRotary",
        "bridged_states",
        "bridged_weights",
        "proven_with",
    ),
    "rtp_runtime.model": ("rope_parameters",),
    "rtp_runtime.state": ("PagedState", "SlotState", "StateDescriptor", "StateDescriptors", "WindowState"),
    "rtp_runtime.weights": (
        "Axis",
        "Concat",
        "Descriptor",
        "FromCheckpoint",
        "Interleave",
        "Layout",
        "Permute",
        "Reshape",
        "Split",
        "Stack",
        "Tie",
        "Weight",
        "WeightDescriptors",
        "renamed",
    ),
}
"""Module -> what generated code may take from it."""

STANDARD = ("collections.abc", "typing")


def import_lines(body: str) -> list[str]:
    """The import block of a file with this body."""
    standard: list[str] = []
    ours: list[str] = []
    for module, names in IMPORTS.items():
        used = [name for name in names if _uses(body, name)]
        (standard if module in STANDARD else ours).extend(from_import(module, used) if used else [])
    torch = ["import torch"] if re.search(r"(?<![\w.])torch\.\w", body) else []
    functional = ["from torch.nn import functional"] if re.search(r"(?<![\w.])functional\.\w", body) else []
    return [*standard, "", *torch, *ours, "from torch import Tensor, nn", *functional]


def _uses(body: str, name: str) -> bool:
    """A function's name may also be an attribute or argument: what counts there is a call."""
    if name[0].isupper():
        return re.search(rf"(?<![\w.\"]){name}\b(?!\")", body) is not None
    return re.search(rf"(?<![\w.]){name}\(", body) is not None
