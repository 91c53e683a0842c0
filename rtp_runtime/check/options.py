"""What a check is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rtp_runtime.check.prompts import PROMPT_LENGTHS
from rtp_runtime.errors import UsageError

STAGES = ("audit", "text", "pinned", "probes", "logits", "greedy", "modes", "serving")
"""All stages, in the order in which they run."""
REQUIRED = ("audit", "pinned", "probes", "logits", "modes")
"""Stages without which nothing is proven: a check that leaves one out cannot pass."""

SERVING_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """What `rtp check` was asked.

    Raises:
        UsageError: an unknown stage, dtype or number.
    """

    model: Path
    reference: Path | None = None
    """The checkpoint that the reference runs; None: `model`."""
    dtype: str = "auto"
    """The serving dtype in which pinned tensors and tables are compared; "auto": the checkpoint's, or bfloat16."""
    stages: tuple[str, ...] = STAGES
    prompts: tuple[str, ...] = ()
    """Texts to add to the checker's own prompts."""
    plugins: tuple[str, ...] = ()
    seed: int = 0
    """Of the drawn prompts."""
    lengths: tuple[int, ...] = PROMPT_LENGTHS
    """Tokens of the drawn prompts; the last one's is raised where a window has to be crossed."""
    num_new_tokens: int = 12
    """Length of the greedy continuations."""
    random: bool = False
    """Draw random weights: `model` need hold no more than a config."""
    layers: str | None = None
    """Of a large model, only these decoder layers: "4" (the first four), "0-3,27", or "kinds" (one of each kind)."""
    experts: int | None = None
    """Keep this many routed experts of each layer, and the router's rows for them."""
    explain: bool = True
    """Whether to look for the cause of the first difference."""

    def __post_init__(self) -> None:
        unknown = [stage for stage in self.stages if stage not in STAGES]
        if unknown:
            raise UsageError(f"stage {unknown[0]!r} does not exist: the stages are {', '.join(STAGES)}")
        if not self.stages:
            raise UsageError(f"no stage is left to run: keep at least one of {', '.join(STAGES)}")
        if self.dtype not in SERVING_DTYPES:
            raise UsageError(f"dtype {self.dtype!r} is unknown: give one of {', '.join(SERVING_DTYPES)}")
        if self.num_new_tokens < 1:
            raise UsageError(f"{self.num_new_tokens} new tokens judge nothing: give 1 or more")
        empty = [text for text in self.prompts if not text]
        if empty:
            raise UsageError("an empty prompt judges nothing: give --prompt some text")

    @property
    def reference_path(self) -> Path:
        return self.reference or self.model
