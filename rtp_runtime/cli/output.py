"""What commands print: one JSON object on stdout for machines, messages on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def print_json(report: Mapping[str, Any]) -> None:
    """Print the one object that a command with `--json` leaves on stdout. Only finite numbers are JSON."""
    sys.stdout.write(json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def say(message: str) -> None:
    """Print a line of progress or an error to stderr."""
    print(message, file=sys.stderr, flush=True)
