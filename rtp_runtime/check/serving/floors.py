"""What the reference's own other paths do to R: no module is judged more strictly than they would be."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from rtp_runtime.check.capture import Capture
from rtp_runtime.check.names import layer_of
from rtp_runtime.check.paths import BATCH, Effort, OtherPath, other_paths
from rtp_runtime.check.reference import Reference
from rtp_runtime.check.serving.ratio import Ratio, rounding_unit
from rtp_runtime.check.serving.runs import Twin, given_inputs, reference_flips


def path_ratios(
    narrow: Reference, twin: Twin, fixed: Iterable[str], unsound: Container[str] = ()
) -> Iterator[tuple[str, dict[str, float]]]:
    """(path, module -> its R) of the reference's other paths in the serving dtype, from the same inputs.

    `fixed`: the modules that were given the same. `unsound`: paths that are wrong in float32 already.
    """
    for path in _paths(narrow, len(twin.ids)):
        if path.name in unsound:
            continue
        mixed: dict[str, Tensor] = {}

        def change(name: str, value: Tensor, mixed: dict[str, Tensor] = mixed) -> Tensor:
            mixed[name] = value
            return twin.exact.calls[name].inputs[0].reshape(value.shape).to(value)

        try:
            with path.setting(), given_inputs(narrow, fixed, change):
                _, other = narrow.capture(twin.ids)
        except (RuntimeError, ValueError, IndexError):
            continue  # what the reference cannot do in this dtype says nothing of ours
        yield path.name, _ratios(twin, other, mixed, narrow)


def _paths(narrow: Reference, num_tokens: int) -> Iterator[OtherPath]:
    """Those that compute a whole prompt with other implementations: sdpa attention, grouped experts."""
    for path in other_paths(narrow, num_tokens, Effort.MODULES, recurrent=False):
        if path.measures_modules and path.name != BATCH and not path.feeding.parts:
            yield path


def _ratios(twin: Twin, other: Capture, mixed: Mapping[str, Tensor], narrow: Reference) -> dict[str, float]:
    unit, layers = rounding_unit(narrow.dtype), narrow.layers
    flips = reference_flips(twin.exact, other, layers)
    found: dict[str, float] = {}
    for name in twin.exact.calls.keys() & twin.narrow.calls.keys() & other.calls.keys():
        sides = (capture.calls[name].outputs for capture in (other, twin.narrow, twin.exact))
        ratio = Ratio(unit)
        for tensors in zip(*sides, strict=False):
            _add(ratio, tensors, _kept(twin, flips, layer_of(name, layers)))
        found[name] = ratio.value
    for name, attention in twin.exact.attention.items():
        # Another implementation is not seen at the interface, but by what the module after it was given.
        after = [key for key, value in mixed.items() if key.startswith(f"{name}.") and _fits(value, attention.output)]
        if after and name in twin.narrow.attention:
            ratio = Ratio(unit)
            value = mixed[after[-1]].reshape(attention.output.shape)
            tensors = (value, twin.narrow.attention[name].output, attention.output)
            _add(ratio, tensors, _kept(twin, flips, layer_of(name, layers)))
            found[name] = max(found.get(name, 0.0), ratio.value)
    return found


def _fits(value: Tensor, output: Tensor) -> bool:
    return value.numel() == output.numel() and value.shape[-1] == output.shape[-1]


def _kept(twin: Twin, flips: Mapping[int, Tensor], layer: int | None) -> Tensor:
    """[tokens] bool: for which all three chose the same."""
    kept = torch.ones(twin.exact.num_tokens, dtype=torch.bool)
    for changed in (twin.flips, flips):
        if layer is not None and layer in changed:
            kept &= ~changed[layer]
    return kept


def _add(ratio: Ratio, tensors: tuple[Tensor, ...], kept: Tensor) -> None:
    other, narrow, exact = tensors
    if other.shape == narrow.shape == exact.shape and len(exact) == len(kept) and exact.is_floating_point():
        ratio.add(other[kept], narrow[kept], exact[kept], kept.nonzero().flatten())
