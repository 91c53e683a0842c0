"""The reference's rotary tables, as its modules hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rtp_kernel.ops.rotary import RopeParameters, rotary_angles
from rtp_runtime.alternatives.rotary import THETAS

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
        elif buffer.ndim == 2 and not leaf.endswith("weight"):
            tables += _by_position(module, buffer.detach())
    return tables


def _by_position(module: str, table: Tensor) -> list[Table]:
    """A table [positions, dim] of sines and then cosines of positions, as GPT-J holds it, by its frequencies."""
    if len(table) < 2 or table.shape[1] % 2 or not table.is_floating_point():
        return []
    half = table.shape[1] // 2
    zeros, ones = torch.zeros(half), torch.ones(half)
    if not torch.equal(table[0].float(), torch.cat((zeros, ones))):
        return []
    found = torch.atan2(table[1, :half], table[1, half:])
    for theta in THETAS:
        inv_freq, scaling = RopeParameters(theta=theta).table(table.shape[1])
        if torch.allclose(inv_freq, found, rtol=1e-5, atol=1e-7):
            return [Table(module, "", inv_freq, scaling, f"RopeParameters(theta={theta})")]
    return []
