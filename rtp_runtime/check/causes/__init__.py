"""Why a module differs: known mistakes, each tried on the reference and compared with our error."""

from __future__ import annotations

from rtp_runtime.check.report import Cause, Finding
from rtp_runtime.check.session import Session


def explain(session: Session, finding: Finding) -> Cause | None:
    """The mistake that explains the first wrong finding; None where nothing can be tried."""
    return None
