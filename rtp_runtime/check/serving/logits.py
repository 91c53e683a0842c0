"""Logits of the whole model in the serving dtype: R, the largest difference and the divergence, each beside the
reference's own. Where nothing is chosen (no experts, no selections), R of them is judged; else it is only shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rtp_runtime.check.compare import ROWS
from rtp_runtime.check.serving.ratio import Ratio

TOO_MUCH_OF_LOGITS = 2.0
"""R of a dense model's logits that is no rounding: its own other paths give 0.8 to 1.1."""


@dataclass(slots=True)
class LogitsRatios:
    """Sums over prompts. All logits are [tokens, vocab] float32."""

    ratio: Ratio
    largest: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """max |difference| of ours and of the reference."""
    divergence: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Sum over tokens of KL(exact, ours) and of KL(exact, the reference)."""

    def add(self, ours: Tensor, narrow: Tensor, exact: Tensor) -> None:
        """Add a prompt."""
        for start in range(0, len(exact), ROWS):
            rows = slice(start, start + ROWS)
            wanted = exact[rows]
            self.ratio.add(ours[rows], narrow[rows], wanted, torch.arange(start, start + len(wanted)))
            for side, logits in enumerate((ours[rows], narrow[rows])):
                self.largest[side] = max(self.largest[side], float((logits - wanted).abs().max()))
                log = logits.double().log_softmax(-1), wanted.double().log_softmax(-1)
                self.divergence[side] += float(torch.nn.functional.kl_div(*log, reduction="sum", log_target=True))

    def numbers(self) -> dict[str, float]:
        """R, and of maxima and divergences ours over the reference's."""
        names = ("logits_max_ratio", "logits_divergence_ratio")
        pairs = zip(names, (self.largest, self.divergence), strict=True)
        return {"logits_ratio": self.ratio.measured} | {name: ours / theirs for name, (ours, theirs) in pairs if theirs}
