"""Causes of what fails only in some execution mode: what is not carried from one step, chunk or request to the next."""

from __future__ import annotations

from rtp_runtime.check.report import Cause, Finding
from rtp_runtime.check.session import Session

MODES = (
    ("one token at a time", "state-in-decode", "a step of one token does not continue what was computed before"),
    ("chunk", "state-across-chunks", "what a chunk leaves is not carried right into the next"),
    ("mixed", "mixed-batch", "prefill and decode in one step disturb each other"),
    ("preempt", "state-after-preemption", "what a preempted request computed is not made again as it was"),
    ("prefix", "state-from-prefix", "what is kept for a prefix is not what computing it gives"),
    ("snapshot", "state-from-snapshot", "what a snapshot restores is not what was saved"),
)


def explain_mode(session: Session, finding: Finding) -> Cause | None:
    """The mode that fails where a whole prefill does not."""
    if finding.stage not in ("modes", "greedy", "logits", "serving"):
        return None
    for name, kind, words in MODES:
        if name in finding.detail:
            return Cause(
                status="closest", kind=kind,
                words=f"a whole prefill matches; {name if name != 'chunk' else 'in chunks'} it does not: {words}, in {finding.module}",
                fix=f"the state that {finding.module} reads and writes: its state descriptor, and the op that is given "
                "the batch",
            )  # fmt: skip
    return None
