"""Which blocks of a model are transformers' own."""

from __future__ import annotations

from torch import nn

from rtp_runtime.bridge.modules import Bridged


def bridged_blocks(module: nn.Module) -> dict[str, str]:
    """Dotted name -> target of every bridged block of a model."""
    return {name: str(part.target) for name, part in module.named_modules() if isinstance(part, Bridged)}
