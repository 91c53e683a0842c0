"""The text stage: what stands around the model, token ids of rendered chats and the ids that stop."""

from __future__ import annotations

from rtp_runtime.check.report import StageResult
from rtp_runtime.check.session import Session


def run_text(session: Session) -> StageResult:
    """Compare our token ids with the tokenizer's own."""
    return StageResult("text")
