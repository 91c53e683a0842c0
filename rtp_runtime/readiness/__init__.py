"""How far a model has come, by recorded evidence: records, where they are kept, what makes them stale, the ladder.

`record` writes evidence of any kind; `rtp check` and `rtp bench` call it, and whatever judges a served model will.
Importing this imports neither torch nor transformers.
"""

from __future__ import annotations

from rtp_runtime.readiness.ladder import STATES, Ladder
from rtp_runtime.readiness.record import KINDS, Conditions, Record
from rtp_runtime.readiness.recording import assess, record
from rtp_runtime.readiness.store import Evidence, EvidenceStore

__all__ = [
    "KINDS",
    "STATES",
    "Conditions",
    "Evidence",
    "EvidenceStore",
    "Ladder",
    "Record",
    "assess",
    "record",
]
