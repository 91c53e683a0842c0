"""State of requests: what a model declares, and the manager that grants, tables and releases it.

The descriptors import no torch; the manager is resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rtp_runtime.exports import lazy_names
from rtp_runtime.state.descriptors import (
    CompressedState,
    PagedState,
    SlotState,
    Snapshots,
    StateDescriptor,
    StateDescriptors,
    WindowState,
)

if TYPE_CHECKING:
    from rtp_runtime.state.holding import Holding
    from rtp_runtime.state.manager import StateManager
    from rtp_runtime.state.tables import StepRow

__all__ = [
    "CompressedState",
    "Holding",
    "PagedState",
    "SlotState",
    "Snapshots",
    "StateDescriptor",
    "StateDescriptors",
    "StateManager",
    "StepRow",
    "WindowState",
]

__getattr__ = lazy_names(__name__, {"Holding": "holding", "StateManager": "manager", "StepRow": "tables"})
