"""The import block of a model file: only what its body uses."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from rtp_kernel import components
from rtp_runtime import bridge, state, weights
from rtp_runtime.enable.code import from_import

STANDARD: Mapping[str, Sequence[str]] = {"collections.abc": ("Mapping", "Sequence"), "typing": ("Any",)}
PUBLIC: Mapping[str, Sequence[str]] = {
    "rtp_kernel.batch": ("Build", "ForwardBatch", "ModelState", "StateView"),
    "rtp_kernel.components": components.__all__,
    "rtp_kernel.ops.activation": ("activation", "gated_activation"),
    "rtp_kernel.registry": ("Support",),
    "rtp_runtime.bridge": bridge.__all__,
    "rtp_runtime.model": ("rope_parameters",),
    "rtp_runtime.state": state.__all__,
    "rtp_runtime.weights": weights.__all__,
    "torch": ("Tensor", "nn"),
    "torch.nn": ("functional",),
}
"""Module -> what generated code may take from it."""


def import_lines(body: str, *relatives: tuple[str, Sequence[str]]) -> list[str]:
    """The import block of a file with this body.

    `relatives`: modules of other plugins and what is taken from them, in the order of their lines.
    """
    used = _names(body)
    standard = [line for module, names in STANDARD.items() for line in _taken(module, names, used)]
    blocks = [(module, _taken(module, names, used)) for module, names in PUBLIC.items()]
    blocks += [(module, from_import(module, names)) for module, names in relatives]
    ours = [line for _, lines in sorted(blocks, key=lambda block: block[0]) for line in lines]
    return [*standard, *([""] if standard else []), *(["import torch"] if "torch" in used else []), *ours]


def _taken(module: str, names: Sequence[str], used: set[str]) -> list[str]:
    found = [name for name in names if name in used]
    return from_import(module, found) if found else []


def _names(body: str) -> set[str]:
    """The names that the body reads and does not bind itself: those of arguments and variables are no imports."""
    nodes = list(ast.walk(ast.parse(body)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return {node.id for node in names} - bound
