"""All seeded faults, each with the cause that should be named."""

from __future__ import annotations

from dataclasses import replace

from check_faults.catalogue import FAULTS
from check_faults.causes import EXPECTED
from check_faults.narrow import NARROW
from check_faults.newer import NEWER
from check_faults.unknown import UNKNOWN

ALL = tuple(replace(fault, cause=EXPECTED.get(fault.name, "")) for fault in (*FAULTS, *NEWER, *NARROW, *UNKNOWN))
