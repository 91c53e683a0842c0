"""Which plugins there are: installed entry points, and modules named by the user. Imports none of them.

Metadata that lies about what is installed is found here: stale (its module is gone) and duplicate (two distributions
under one plugin name).
"""

from __future__ import annotations

import importlib
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, EntryPoint, entry_points

from rtp_runtime.hookspecs import ENTRY_POINT_GROUP
from rtp_runtime.lazy import Origin, find_module
from rtp_runtime.plugins.failures import BadPluginError


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plugin to be loaded: an entry point's value, or a module named by the user (`named`: a failure is fatal)."""

    origin: Origin
    value: str
    named: bool = False
    fault: BadPluginError | None = None
    """What its metadata alone shows to be wrong."""

    @property
    def module(self) -> str:
        return self.value.partition(":")[0].strip()


def discover(names: Sequence[str] = ()) -> list[Candidate]:
    """Installed plugins in the order of their names, then those in `names` that are not among them."""
    importlib.invalidate_caches()
    candidates = _without_duplicates(_installed())
    named = set(names)
    found = [replace(candidate, named=candidate.module in named) for candidate in candidates]
    installed = {candidate.module for candidate in found}
    extra = [name for name in dict.fromkeys(names) if name not in installed]
    return found + [_checked(Candidate(Origin(name), name, named=True)) for name in extra]


def _installed() -> list[Candidate]:
    """One candidate for each (name, value, distribution): an interrupted upgrade leaves its metadata twice."""
    unique: dict[tuple[str, str, str], Candidate] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        candidate = _from_entry_point(point)
        unique.setdefault((point.name, point.value, candidate.origin.distribution or ""), candidate)
    return sorted(unique.values(), key=lambda each: (each.origin.plugin, each.origin.distribution or ""))


def _from_entry_point(point: EntryPoint) -> Candidate:
    distribution = point.dist
    assert distribution is not None, "entry points of installed metadata carry their distribution"
    name = distribution.metadata["Name"] if distribution.metadata else None
    if not name:
        place = _place(distribution)
        fault = BadPluginError(
            "stale",
            f"the metadata at {place} names no distribution: it is what an interrupted installation left. Remove it.",
        )
        return Candidate(Origin(point.name), point.value, fault=fault)
    return _checked(Candidate(Origin(point.name, name, distribution.version), point.value), distribution)


def _checked(candidate: Candidate, distribution: Distribution | None = None) -> Candidate:
    if find_module(candidate.module) is not None:
        return candidate
    if distribution is None:
        fault = BadPluginError(
            "missing", f"there is no module {candidate.module!r} to import. Check the name and the path."
        )
    elif _ships_python(distribution):
        fault = BadPluginError(
            "broken",
            f"its entry point names the module {candidate.module!r}, which it does not contain. "
            f'Correct [project.entry-points."{ENTRY_POINT_GROUP}"] and install it again.',
        )
    else:
        fault = BadPluginError(
            "stale",
            f"its metadata at {_place(distribution)} is stale: the module {candidate.module!r} is not installed any "
            f"more. Install it again, or run: pip uninstall {candidate.origin.distribution}",
        )
    return replace(candidate, fault=fault)


def _without_duplicates(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Which of two plugins of one name is meant must not depend on the order of sys.path: both are refused."""
    by_name: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        by_name[candidate.origin.plugin].append(candidate)
    result: list[Candidate] = []
    for name, same in by_name.items():
        if len(same) > 1:
            owners = " and ".join(f"{each.origin.distribution} {each.origin.version} ({each.value})" for each in same)
            fault = BadPluginError("duplicate", f"the plugin name {name!r} is taken twice: by {owners}. Uninstall one.")
            same = [replace(candidate, fault=fault) for candidate in same]
        result += same
    return result


def _ships_python(distribution: Distribution) -> bool:
    files = distribution.files or []
    return any(file.suffix == ".py" and os.path.isfile(str(distribution.locate_file(file))) for file in files)


def _place(distribution: Distribution) -> str:
    return str(getattr(distribution, "_path", "an unknown place"))
