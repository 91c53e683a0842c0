"""The reference against itself: by how much its own paths disagree, per module and in its logits.

No verdict goes below that. A path that disagrees by far more than rounding does not widen a tolerance: it is shown as
an inconsistency of the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

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

    def merge(self, other: Noise) -> None:
        """Take the larger of each."""
        for mine, theirs in (
            (self.logits, other.logits),
            (self.modules, other.modules),
            (self.inconsistent, other.inconsistent),
        ):
            for name, value in theirs.items():
                mine[name] = max(value, mine.get(name, 0.0))

    def worst_module(self) -> tuple[str, float] | None:
        """The module in which the reference disagrees with itself most, and by how much."""
        return max(self.modules.items(), key=lambda item: item[1], default=None)


def add_noise(noise: Noise, reference: Reference, ids: Sequence[int], logits: Tensor, capture: Capture) -> None:
    """Run the reference's second paths over one prompt, of which `logits` and `capture` are the first path's."""
    for name, run in reference.paths().items():
        other = run(ids)
        error = logits_error(other, logits[: len(other)]).value
        noise.logits[name] = max(error, noise.logits.get(name, 0.0))
        if not error <= SOUND * LOGITS_TOLERANCE:
            noise.inconsistent[name] = noise.logits[name]
    index = torch.arange(capture.num_tokens)

    def compare(name: str, outputs: tuple[Tensor, ...]) -> None:
        error = RelativeError()
        for pair in pair_tensors(outputs, capture.calls[name].outputs).pairs:
            keep = torch.ones(len(index), dtype=torch.bool) if pair.ties is None else ~pair.ties
            error.add(pair.ours[keep], pair.reference[keep], index[keep])
        if error.value <= SOUND * MODULE_TOLERANCE:
            noise.modules[name] = max(error.value, noise.modules.get(name, 0.0))

    for setting in reference.settings().values():
        with setting():
            reference.replay(ids, capture, compare)
