"""Whether a record still speaks about what stands here, and if not, exactly why.

Stale is evidence whose checkpoint, plugin, runtime, kernel, torch or (for what is compared with the reference)
transformers is another one now. Where and when it was obtained makes nothing stale: that is told beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rtp_runtime.readiness.content import changed_files, some
from rtp_runtime.readiness.record import Package, Record

if TYPE_CHECKING:
    from rtp_runtime.readiness.subject import Code, Subject

Manifests = Callable[[str], Mapping[str, str] | None]
"""The files behind a digest, or None."""

BY_NUMBERS_ONLY = frozenset({"bench"})
"""Kinds that neither read texts nor ask the reference: a new tokenizer or transformers leaves them alone."""


@dataclass(frozen=True, slots=True)
class Staleness:
    """Why a record is stale (nothing: it is fresh), and what differs without making it so."""

    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fresh(self) -> bool:
        return not self.reasons


def concerns(record: Record, subject: Subject) -> bool:
    """Whether a record is about this model, perhaps as it was: by content, or by name and architecture."""
    theirs, ours = record.conditions.model, subject.checkpoint.identity
    if (theirs.config, theirs.weights) == (ours.config, ours.weights):
        return True
    return (theirs.architecture, _last(theirs.name)) == (ours.architecture, _last(ours.name))


def staleness(record: Record, subject: Subject, manifest: Manifests) -> Staleness:
    """Compare a record's conditions with what stands here."""
    reasons: list[str] = []
    notes: list[str] = []
    numbers_only = record.kind in BY_NUMBERS_ONLY
    _compare_checkpoint(record, subject, manifest, reasons, notes)
    conditions = record.conditions
    _compare_plugins(conditions.plugins, subject.plugins, manifest, reasons)
    for before, code, name in (
        (conditions.runtime, subject.runtime, "runtime"),
        (conditions.kernel, subject.kernel, "kernel"),
    ):
        _compare_code(name, before, code, manifest, reasons)
    for name, version in subject.versions.items():
        said = conditions.versions.get(name, "unknown")
        if said != version:
            matters = name == "torch" or (name == "transformers" and not numbers_only)
            (reasons if matters else notes).append(f"{name} {said} → {version}")
    return Staleness(tuple(reasons), tuple(notes))


def _compare_checkpoint(
    record: Record, subject: Subject, manifest: Manifests, reasons: list[str], notes: list[str]
) -> None:
    theirs, ours = record.conditions.model, subject.checkpoint.identity
    for part in ("config", "weights", "text"):
        before, after = getattr(theirs, part), getattr(ours, part)
        if before == after:
            continue
        files = subject.checkpoint.parts[part].files
        what = f"checkpoint changed: {_which(before, files, manifest, part)}"
        only_told = part == "text" and record.kind in BY_NUMBERS_ONLY
        (notes if only_told else reasons).append(what)


def _compare_plugins(
    before: tuple[Package, ...], after: tuple[Code, ...], manifest: Manifests, reasons: list[str]
) -> None:
    now = {code.package.name: code for code in after}
    for package in before:
        code = now.pop(package.name, None)
        if code is None:
            reasons.append(f"plugin {package.name} {package.version} took part and is not installed or not used now")
        else:
            _compare_code(f"plugin {package.name}", package, code, manifest, reasons)
    reasons += [f"plugin {name} {code.package.version} takes part now and did not" for name, code in now.items()]
    if before and after and before[0].name != after[0].package.name:
        reasons.append(f"it was served by plugin {before[0].name}, now by {after[0].package.name}")


def _compare_code(name: str, before: Package, code: Code, manifest: Manifests, reasons: list[str]) -> None:
    now = code.package
    version = f"{before.version} → {now.version}" if before.version != now.version else now.version
    if before.content != now.content:
        which = _which(before.content, code.content.files, manifest, "files")
        reasons.append(f"{name} {version} content changed: {which}")
    elif before.version != now.version:
        reasons.append(f"{name} {version}")


def _which(before: str, files: Mapping[str, str], manifest: Manifests, part: str) -> str:
    known = {} if not before else manifest(before)
    if known is None:
        return f"{part} (which is not known: the list of files is not among the manifests)"
    return some(changed_files(known, files)) or part


def _last(name: str) -> str:
    return name.rpartition("/")[2]
