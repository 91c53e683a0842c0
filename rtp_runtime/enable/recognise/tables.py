"""The reference's rotary tables, as its modules hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rtp_kernel.ops.rotary import rotary_angles

SUFFIX = "inv_freq"


@dataclass(frozen=True, eq=False)
class Table:
    """One table of the reference's rotary module; `key` is "" or the layer type it is for."""

    module: str
    key: str
    inv_freq: Tensor
    scaling: float
    code: str | None = None
    """Code of its parameters, where no key of the config holds them."""

    def angles(self, tokens: int) -> tuple[Tensor, Tensor]:
        """cos and sin [tokens, rotary dim] of positions 0 .. tokens - 1."""
        return rotary_angles(torch.arange(tokens), self.inv_freq, self.scaling, torch.float32)


def find_tables(model: torch.nn.Module) -> list[Table]:
    """Every table of inverse frequencies among the model's buffers."""
    tables = []
    for name, buffer in model.named_buffers():
        module, _, leaf = name.rpartition(".")
        if leaf.endswith(SUFFIX) and "original" not in leaf:
            owner = model.get_submodule(module)
            key = leaf.removesuffix(SUFFIX).removesuffix("_")
            scaling = getattr(owner, f"{key}_attention_scaling" if key else "attention_scaling", 1.0)
            tables.append(Table(module, key, buffer.detach(), float(scaling)))
    return tables
