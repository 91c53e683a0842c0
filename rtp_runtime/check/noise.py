"""The reference against itself: by how much its own paths disagree, per module and in its logits.

No verdict goes below that. A path that disagrees by far more than rounding does not widen a tolerance: it is shown as
an inconsistency of the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rtp_runtime.check.capture import Capture
from rtp_runtime.check.compare import LOGITS_TOLERANCE, MODULE_TOLERANCE, RelativeError, logits_error, tolerance
from rtp_runtime.check.pairs import pair_tensors
from rtp_runtime.check.reference import Reference

SOUND = 10.0
"""A path counts as noise while it disagrees by less than this many tolerances."""


@dataclass(slots=True)
class Noise:
    """The reference's disagreement with itself. Empty where it offers no second path."""

    logits: dict[str, float] = field(default_factory=dict)
    """Path -> max difference over the standard deviation."""
    modules: dict[str, float] = field(default_factory=dict)
    """Module -> relative error, given the same layer inputs."""
    inconsistent: dict[str, float] = field(default_factory=dict)
    """Paths too far off to be noise."""

    def module_tolerance(self, module: str) -> float:
        return tolerance(MODULE_TOLERANCE, self.modules.get(module, 0.0))

    @property
    def logits_tolerance(self) -> float:
        sound = [value for path, value in self.logits.items() if path not in self.inconsistent]
        return tolerance(LOGITS_TOLERANCE, max(sound, default=0.0))

    def worst_module(self) -> tuple[str, float] | None:
        """The module in which the reference disagrees with itself most, and by how much."""
        return max(self.modules.items(), key=lambda item: item[1], default=None)


def measure_noise(reference: Reference, prompts: Mapping[str, Sequence[int]]) -> Noise:
    """Run the reference's second paths over the prompts, the longest ones of a check being the ones that tell most."""
    noise = Noise()
    for ids in prompts.values():
        logits, capture = reference.capture(ids)
        for name, run in reference.paths().items():
            error = logits_error(run(ids), logits).value
            noise.logits[name] = max(error, noise.logits.get(name, 0.0))
        for setting in reference.settings().values():
            with setting():
                _, other = reference.capture(ids, graft=capture)
            _add_modules(noise, capture, other)
    noise.inconsistent = {path: value for path, value in noise.logits.items() if not value <= SOUND * LOGITS_TOLERANCE}
    return noise


def _add_modules(noise: Noise, one: Capture, other: Capture) -> None:
    index = torch.arange(one.num_tokens)
    for name in one.calls.keys() & other.calls.keys():
        error = RelativeError()
        for pair in pair_tensors(other.calls[name].outputs, one.calls[name].outputs).pairs:
            keep = torch.ones(len(index), dtype=torch.bool) if pair.ties is None else ~pair.ties
            error.add(pair.ours[keep], pair.reference[keep], index[keep])
        if error.value <= SOUND * MODULE_TOLERANCE:
            noise.modules[name] = max(error.value, noise.modules.get(name, 0.0))
