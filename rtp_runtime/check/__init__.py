"""Correctness against the Hugging Face reference: `run_check(CheckOptions(model=...)) -> CheckReport`.

The judge is a comparison in float32 of every sub-block, fed the reference's own input; around it stand the audit,
pinned tables, logits, greedy tokens and the execution modes. Nothing here names a family of models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rtp_runtime.check.options import STAGES, CheckOptions
from rtp_runtime.check.report import CheckReport, Finding, Measure, NotJudged, StageResult
from rtp_runtime.exports import lazy_names

if TYPE_CHECKING:
    from rtp_runtime.check.run import run_check

__all__ = ["STAGES", "CheckOptions", "CheckReport", "Finding", "Measure", "NotJudged", "StageResult", "run_check"]

__getattr__ = lazy_names(__name__, {"run_check": "run"})
