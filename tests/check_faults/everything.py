"""All seeded faults, each with the cause that should be named, and the parts of them that run with every test run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from check_faults.catalogue import FAULTS, Fault
from check_faults.causes import EXPECTED
from check_faults.narrow import NARROW
from check_faults.newer import NEWER
from check_faults.unknown import UNKNOWN

ALL = tuple(replace(fault, cause=EXPECTED.get(fault.name, "")) for fault in (*FAULTS, *NEWER, *NARROW, *UNKNOWN))


def subtlest(key: Callable[[Fault], Hashable]) -> dict[Hashable, Fault]:
    """Of each group of faults with the same key, the one with the smallest effect; the first of equals."""
    found: dict[Hashable, Fault] = {}
    for fault in sorted(ALL, key=lambda fault: fault.effect):
        found.setdefault(key(fault), fault)
    return found


PART = tuple(subtlest(lambda fault: (fault.stage, fault.entry, fault.base)).values())
"""For each stage, way of entry and checkpoint, its subtlest fault."""
SMALL_PART = tuple(subtlest(lambda fault: (fault.stage, fault.entry)).values())
"""For each stage and way of entry, its subtlest fault."""
