"""What the reference's own other paths do to R: no module is judged more strictly than they would be."""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch import Tensor

from rtp_runtime.check.names import layer_of
from rtp_runtime.check.paths import BATCH, Effort, OtherPath, other_paths
from rtp_runtime.check.reference import Reference
from rtp_runtime.check.selections import Choices, is_selection
from rtp_runtime.check.serving.ratio import Ratio, rounding_unit
from rtp_runtime.check.serving.runs import Twin


class PathRatios:
    """Listens to a replay of the narrow reference in which something is computed another way."""

    def __init__(self, twin: Twin, layers: dict[str, int], unit: float) -> None:
        self._twin = twin
        self._layers = layers
        self._unit = unit
        self._left_out = {layer: flips.clone() for layer, flips in twin.flips.items()}
        self.ratios: dict[str, Ratio] = {}

    def __call__(self, name: str, outputs: tuple[Tensor, ...], start: int) -> None:
        """A module's outputs [rows, …] of the tokens from `start` on."""
        layer = layer_of(name, self._layers)
        if layer is None or not outputs:
            return
        index = torch.arange(start, start + len(outputs[0]))
        exact, narrow = self._twin.exact.calls[name].outputs, self._twin.narrow.calls[name].outputs
        out = self._left_out.setdefault(layer, torch.zeros(self._twin.exact.num_tokens, dtype=torch.bool))
        sides = [
            (other, wide, small)
            for other, wide, small in zip(outputs, exact, narrow, strict=False)
            if other.shape[1:] == wide.shape[1:] == small.shape[1:] and len(wide) > int(index[-1])
        ]
        for other, wide, _ in sides:
            if is_selection(wide):
                out[index] |= Choices(other, wide[index]).changed
        keep = ~out[index]
        kept, ratio = index[keep], self.ratios.setdefault(name, Ratio(self._unit))
        for other, wide, small in sides:
            if wide.is_floating_point():
                ratio.add(other[keep], small[kept], wide[kept], kept)


def path_ratios(narrow: Reference, twin: Twin, unsound: Container[str] = ()) -> Iterator[tuple[str, dict[str, float]]]:
    """(path, module -> its R) of the reference's other paths in the serving dtype, from the same layer inputs.

    `unsound`: paths that are wrong in float32 already.
    """
    for path in _paths(narrow, len(twin.ids)):
        if path.name in unsound:
            continue
        heard = PathRatios(twin, dict(narrow.layers), rounding_unit(narrow.dtype))
        try:
            path.replay(narrow, twin.ids, twin.exact, heard)
        except (RuntimeError, ValueError, IndexError):
            continue  # what the reference cannot do in this dtype says nothing of ours
        yield path.name, {name: ratio.value for name, ratio in heard.ratios.items()}


def _paths(narrow: Reference, num_tokens: int) -> Iterator[OtherPath]:
    for path in other_paths(narrow, num_tokens, Effort.MODULES, recurrent=False):
        if path.measures_modules and path.name != BATCH and len(path.feeding.parts) <= (2 if narrow.is_small else 0):
            yield path
