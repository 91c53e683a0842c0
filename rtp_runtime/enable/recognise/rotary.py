"""Whether the reference's rotary tables are ours, and which of our layouts turns what went in into what came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rtp_kernel.ops.rotary import LAYOUTS, RopeParameters, rotary
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import same
from rtp_runtime.enable.recognise.tables import Table, find_tables
from rtp_runtime.enable.recognise.view import View
from rtp_runtime.enable.recording import tensors
from rtp_runtime.model import ModelConfig, rope_parameters


def check_tables(view: View, config: ModelConfig) -> None:
    """The reference's tables for the full config, bit for bit against ours.

    Raises:
        UnrecognisedError: a rope type or share that is not ours.
        ConfigError: the config holds no theta.
    """
    for name in dict.fromkeys(table.module for table in view.tables if table.code is None):
        full = type(view.module(name))(config=config.hf)
        for table in find_tables(full):
            try:
                rope = RopeParameters.from_dict(_parameters(config.hf, table.key))
                inv_freq, scaling = rope.table(2 * table.inv_freq.numel())
            except (ValueError, TypeError) as error:
                raise UnrecognisedError(
                    view.label(name), f"{error}.", "that rope type in rtp_kernel.ops.rotary"
                ) from error
            rope_parameters(config, table.key or None)
            if not torch.equal(inv_freq, table.inv_freq) or scaling != table.scaling:
                raise UnrecognisedError(
                    view.label(name),
                    f"its table is not that of rope type {rope.rope_type!r}.",
                    "that table in rtp_kernel.ops.rotary",
                )


def _parameters(config: Any, key: str) -> dict[str, Any]:
    values: dict[str, Any] = config.rope_parameters
    return values[key] if key else values


@torch.no_grad()
def stays_wide(view: View, name: str) -> bool:
    """Whether the module of a table gives float32 angles to a narrower model."""
    call = view.recording.calls_of(name)[0]
    try:
        found = call.module(call.inputs[0].bfloat16(), *call.inputs[1:])
    except (TypeError, RuntimeError, ValueError):  # a module that wants its arguments otherwise
        return False
    return all(tensor.dtype == torch.float32 for tensor in tensors(found))


@dataclass(frozen=True, eq=False)
class Turn:
    """A rotary table and how heads are turned by it."""

    table: Table
    layout: str
    inverse: bool = False
    """By the opposite angles."""

    def of(self, x: Tensor, heads: int) -> Tensor:
        """x [tokens, heads * dim] with its heads turned."""
        q = x.view(x.shape[0], heads, -1)
        cos, sin = self.table.angles(x.shape[0])
        return rotary(q, q, cos, -sin if self.inverse else sin, self.layout)[0].flatten(1)


def candidates(view: View, x: Tensor, heads: int, layer: int) -> list[tuple[Turn, Tensor]]:
    """x turned by every table in every layout; of those with one result the layer type's own table comes first."""
    results: list[tuple[Turn, Tensor]] = []
    kinds = getattr(view.config, "layer_types", None)
    for table in sorted(view.tables, key=lambda table: not kinds or table.key != kinds[layer]):
        if 2 * table.inv_freq.numel() > x.shape[-1] // heads:
            continue
        for layout in LAYOUTS:
            for inverse in (False, True):
                turn = Turn(table, layout, inverse)
                result = turn.of(x, heads)
                if not any(same(result, other) for _, other in results):
                    results.append((turn, result))
    return results
