"""The serving stage: what the serving dtype adds, against what it adds in the reference."""

from __future__ import annotations

from rtp_runtime.check.report import StageResult
from rtp_runtime.check.session import Session


def run_serving(session: Session) -> StageResult:
    """Compare rounding, sub-block by sub-block."""
    return StageResult("serving")
