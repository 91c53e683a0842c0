"""Correctness against the Hugging Face reference: `run_check(CheckOptions(model=...)) -> CheckReport`.

The judge is a comparison in float32 of every sub-block, fed the reference's own input; around it stand the audit,
pinned tables, logits, greedy tokens and the execution modes. Nothing here names a family of models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rtp_runtime.check.options import STAGES, CheckOptions
from rtp_runtime.check.report import CheckReport, Finding, Measure, NotJudged, StageResult

if TYPE_CHECKING:
    from rtp_runtime.check.run import run_check

__all__ = ["STAGES", "CheckOptions", "CheckReport", "Finding", "Measure", "NotJudged", "StageResult", "run_check"]


def __getattr__(name: str) -> Any:
    if name == "run_check":
        from rtp_runtime.check.run import run_check

        return run_check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
