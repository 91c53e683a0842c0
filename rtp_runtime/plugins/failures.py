"""How a plugin can fail, and the record that is kept of it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Literal

from rtp_runtime.errors import PluginError
from rtp_runtime.lazy import Origin

FailureKind = Literal[
    "broken",  # cannot be imported, or a string it registers names nothing
    "duplicate",  # its name is taken by another distribution too
    "empty",  # no marked hook
    "heavy",  # imports torch or transformers while it registers
    "misspelt",  # a marked hook that rtp does not have, or an argument it does not pass
    "missing",  # a module named by the user that does not exist
    "outdated",  # written for another version of the API
    "raising",  # a hook raised
    "stale",  # metadata without an installed distribution
    "unknown model",  # adds to an architecture that nobody provides
    "unmarked",  # a function named as a hook that lacks the marker
]


class BadPluginError(PluginError):
    """A PluginError that knows its kind."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin that was found and not loaded, and why."""

    name: str
    distribution: str | None
    version: str | None
    kind: FailureKind
    cause: str
    traceback: str

    @classmethod
    def of(cls, origin: Origin, fault: BadPluginError) -> PluginFailure:
        """The record of `fault`, with the traceback of what caused it."""
        cause = fault.__cause__ or fault
        lines = traceback.format_exception(cause) if cause.__traceback__ else []
        return cls(origin.plugin, origin.distribution, origin.version, fault.kind, str(fault), "".join(lines))

    def __str__(self) -> str:
        return f"{Origin(self.name, self.distribution, self.version)} is {self.kind}: {self.cause}"
