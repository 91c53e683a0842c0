"""Every environment variable that rtp reads, with its type. A value that cannot be read is a UsageError.

RTP_PLUGINS     names of plugin modules, separated by commas; loaded besides the installed plugins
RTP_DEBUG       1 or 0: commands show the traceback of an error
RTP_EVIDENCE    the directory that evidence is kept in (`rtp check`, `rtp bench`, `rtp readiness`)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rtp_runtime.errors import UsageError

_BOOLEANS = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}


@dataclass(frozen=True, slots=True)
class Environment:
    """The settings that the environment makes."""

    plugins: tuple[str, ...] = ()
    debug: bool = False
    evidence: str | None = None


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read and check every variable of `environ` (default: the process's own)."""
    values = os.environ if environ is None else environ
    return Environment(
        plugins=_module_names("RTP_PLUGINS", values.get("RTP_PLUGINS", "")),
        debug=_boolean("RTP_DEBUG", values.get("RTP_DEBUG", "")),
        evidence=values.get("RTP_EVIDENCE") or None,
    )


def _boolean(name: str, value: str) -> bool:
    try:
        return _BOOLEANS[value.strip().lower()]
    except KeyError:
        raise UsageError(f"{name}={value!r} is neither 1 nor 0. Set it to 1 or unset it.") from None


def _module_names(name: str, value: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in value.split(",") if part.strip())
    for module in names:
        if not all(part.isidentifier() for part in module.split(".")):
            raise UsageError(
                f"{name}={value!r}: {module!r} is not the name of a module. Write importable names separated by "
                f"commas, such as {name}=my_plugin,other.plugin."
            )
    return names
