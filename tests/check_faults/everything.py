"""All seeded faults."""

from __future__ import annotations

from check_faults.catalogue import FAULTS
from check_faults.newer import NEWER

ALL = (*FAULTS, *NEWER)
