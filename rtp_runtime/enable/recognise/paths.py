"""From what attention was given back to the projections: packings, norms, rotary layouts and factors, by hypothesis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rtp_runtime.enable.blocks import Projection
from rtp_runtime.enable.match import RELATIVE, same
from rtp_runtime.enable.recognise.rotary import Turn, candidates
from rtp_runtime.enable.recognise.view import View, is_linear, layer_index, linears, projection_of, rows
from rtp_runtime.enable.recording import Call


@dataclass(frozen=True, eq=False)
class Path:
    """How a projection's output became a query, key or value."""

    projection: Projection
    norm: Call | None = None
    norm_after_rotary: bool = False
    turn: Turn | None = None
    factor: Tensor | None = None
    """[tokens] by which it was multiplied at the end; None = by 1."""

    @property
    def constant(self) -> float | None:
        """The factor, where it is one for all tokens."""
        if self.factor is None:
            return 1.0
        spread = float((self.factor - self.factor[0]).abs().max())
        return float(self.factor.mean()) if spread <= RELATIVE * float(self.factor.abs().max()) else None


@dataclass(frozen=True, eq=False)
class Tracer:
    """Tries what may stand between the projections of one attention block and a tensor that attention was given."""

    view: View
    name: str
    calls: Sequence[Call]
    """Of every module inside the block."""

    def trace(self, target: Tensor) -> Path | None:
        """How [1, heads, tokens, dim] was made; None when it is no such path."""
        heads, dim = target.shape[1], target.shape[3]
        wanted = rows(target, heads)
        for projection, base in self.slices(wanted.shape[-1], dim):
            for path, result in self._ways(Path(projection), base, heads):
                factor = _factor(result, wanted)
                if factor is not None:
                    plain = float((factor - 1).abs().max()) <= RELATIVE
                    return replace(path, factor=None if plain else factor)
        return None

    def slices(self, size: int, dim: int) -> Iterator[tuple[Projection, Tensor]]:
        """Outputs of projections that are `size` wide; then runs of whole heads in wider ones, also group by group."""
        calls = [call for call in linears(self.calls) if call.outputs]
        for call in calls:
            out = rows(call.outputs[0])
            if out.shape[-1] == size:
                yield projection_of(call, self.name, 0, size), out
        for call in calls:
            out = rows(call.outputs[0])
            units = size // dim
            for groups in [count for count in range(1, units + 1) if units % count == 0 and out.shape[-1] % count == 0]:
                grouped, part = out.view(len(out), groups, -1), size // groups
                for start in range(0, grouped.shape[-1] - part + 1, dim):
                    if out.shape[-1] > size:
                        found = projection_of(call, self.name, start, size, whole=False, groups=groups)
                        yield found, grouped[..., start : start + part].flatten(1)

    def _ways(self, path: Path, base: Tensor, heads: int) -> Iterator[tuple[Path, Tensor]]:
        yield path, base
        layer = layer_index(self.name)
        for norm, normed in self._normed(base, heads):
            yield replace(path, norm=norm), normed
            for turn, result in candidates(self.view, normed, heads, layer):
                yield replace(path, norm=norm, turn=turn), result
        for turn, result in candidates(self.view, base, heads, layer):
            yield replace(path, turn=turn), result
            for norm, normed in self._normed(result, heads):
                yield replace(path, norm=norm, norm_after_rotary=True, turn=turn), normed

    def _normed(self, x: Tensor, heads: int) -> Iterator[tuple[Call, Tensor]]:
        """The norms that were given x, and what they gave."""
        for call in self.calls:
            if is_linear(call.module) or not call.inputs or not call.outputs:
                continue
            if call.inputs[0].numel() == x.numel() == call.outputs[0].numel() and same(rows(call.inputs[0], heads), x):
                result = rows(call.outputs[0], heads)
                if not same(result, x):
                    yield call, result


def _factor(found: Tensor, wanted: Tensor) -> Tensor | None:
    """What each row [tokens, width] was multiplied by; None when it is no multiple."""
    if found.shape != wanted.shape:
        return None
    found, wanted = found.double(), wanted.double()
    factor = (found * wanted).sum(-1) / found.square().sum(-1).clamp(min=1e-30)
    error = (found * factor[:, None] - wanted).abs().max()
    held = bool(error <= RELATIVE * wanted.abs().max())
    return factor.float() if held and bool(torch.isfinite(factor).all()) else None
