"""Whether a checkpoint holds exactly what a model's descriptors ask for, from headers alone, before memory is taken."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rtp_runtime.errors import CheckpointError, PluginError
from rtp_runtime.weights.descriptors import WeightDescriptors
from rtp_runtime.weights.dtypes import may_load
from rtp_runtime.weights.headers import Headers, TensorHeader
from rtp_runtime.weights.operations import Slice, leaves
from rtp_runtime.weights.regions import Region, uncovered
from rtp_runtime.weights.resolve import ResolvedLayout, resolve

MAX_SHOWN = 6
"""Findings of a kind that a message spells out."""
MAX_COMPARED = 200
"""Names that a hint is looked for among."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One disagreement between a layout and a checkpoint."""

    kind: str
    """missing, unexpected, shape, dtype, unused or tied."""
    tensor: str
    message: str


@dataclass(frozen=True, slots=True)
class Audit:
    """A layout compared with a checkpoint."""

    layout: ResolvedLayout
    findings: tuple[Finding, ...]
    skipped: Mapping[str, str]
    """Tensors left out on purpose -> reason."""
    tied: Mapping[str, str]
    """Tensors that are present although their parameter is tied -> the parameter; compared while loading."""
    notes: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return not self.findings

    def report(self, max_shown: int = MAX_SHOWN) -> str:
        """The findings in words, at most `max_shown` of each kind."""
        lines = []
        for kind in dict.fromkeys(finding.kind for finding in self.findings):
            same = [finding.message for finding in self.findings if finding.kind == kind]
            lines += [f"  {kind}: {message}" for message in same[:max_shown]]
            if len(same) > max_shown:
                lines.append(f"  {kind}: … and {len(same) - max_shown} more")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def audit_layout(
    layout: ResolvedLayout, headers: Headers, model_dtype: str, tie_flags: Mapping[str, bool] | None = None
) -> Audit:
    """Compare `layout` with what the files say they hold.

    `tie_flags`: each place in the config that says whether the output head is tied, and what it says there.
    """
    wanted = _wanted(layout)
    tied = {tie.parameter: tie.to for tie in layout.ties if tie.parameter in headers.tensors}
    extra = [name for name in headers.tensors if name not in wanted and name not in tied]
    skipped = {name: reason for name in extra if (reason := layout.skip_reason(name)) is not None}
    unexpected = [name for name in extra if name not in skipped]
    missing = [name for name in wanted if name not in headers.tensors]
    findings = (
        *_missing(missing, unexpected, wanted, headers),
        *_unexpected(unexpected, missing, headers),
        *_misfits(layout, headers, model_dtype),
        *_tied(layout, headers),
    )
    return Audit(
        layout, findings, skipped, tied, (*headers.notes, *_tie_notes(layout, headers, missing, tie_flags or {}))
    )


def audit_layouts(
    descriptors: WeightDescriptors, headers: Headers, model_dtype: str, tie_flags: Mapping[str, bool] | None = None
) -> list[Audit]:
    """The audit of every layout of a model, the nearest first."""
    audits = [audit_layout(resolve(layout), headers, model_dtype, tie_flags) for layout in descriptors.layouts]
    return sorted(audits, key=lambda audit: len(audit.findings))


def choose_layout(
    descriptors: WeightDescriptors, headers: Headers, model_dtype: str, tie_flags: Mapping[str, bool] | None = None
) -> Audit:
    """`audit_layouts`, then `pick_layout`."""
    return pick_layout(audit_layouts(descriptors, headers, model_dtype, tie_flags), headers)


def pick_layout(audits: Sequence[Audit], headers: Headers) -> Audit:
    """The audit of the one layout that is clean. Raises CheckpointError, showing each audit, for none or several."""
    clean: list[Audit] = []
    for audit in audits:
        if audit.clean and not any(_same(audit, other) for other in clean):
            clean.append(audit)
    if len(clean) == 1:
        return clean[0]
    if clean:
        names = ", ".join(repr(audit.layout.name) for audit in clean)
        raise CheckpointError(
            f"{headers.directory}: the layouts {names} all fit this checkpoint, and they differ. Their descriptors "
            "must tell them apart (a Skip that is too wide?)."
        )
    _refuse_quantised(headers)
    reports = [audits[0].report(), *(audit.report(max_shown=1) for audit in audits[1:])]
    shown = "\n".join(f"layout {audit.layout.name!r}:\n{text}" for audit, text in zip(audits, reports, strict=True))
    raise CheckpointError(
        f"{headers.directory}: the checkpoint is not what the model needs.\n{shown}\n"
        "If the files are damaged, download them again; if not, the config or the plugin is not made for them."
    )


def _refuse_quantised(headers: Headers) -> None:
    """Raises CheckpointError, naming what is stored so, for a checkpoint whose weights are 8-bit floats."""
    stored = [header for header in headers.tensors.values() if header.dtype.startswith("float8")]
    if not stored:
        return
    example, scale = stored[0], next((name for name in headers.tensors if "scale" in name.rpartition(".")[2]), None)
    apart = f", with their scales apart (as in {scale})" if scale else ""
    raise CheckpointError(
        f"{headers.directory}: {len(stored)} of {len(headers.tensors)} tensors are quantised: {example.name} is "
        f"{example.describe()}{apart}. FP8 tensors are not supported yet. Take a checkpoint of the model in bfloat16 "
        "or float32, or convert this one to it."
    )


def _same(one: Audit, other: Audit) -> bool:
    return one.layout.parameters == other.layout.parameters and one.layout.ties == other.layout.ties


def _wanted(layout: ResolvedLayout) -> dict[str, tuple[int, ...]]:
    wanted: dict[str, tuple[int, ...]] = {}
    for parameter in layout.parameters:
        for leaf in leaves(parameter.source):
            if wanted.setdefault(leaf.name, leaf.shape) != leaf.shape:
                raise PluginError(
                    f"{leaf.name} is said to be {wanted[leaf.name]} and, for {parameter.name}, {leaf.shape}."
                )
    return wanted


def _missing(
    missing: list[str], unexpected: list[str], wanted: Mapping[str, tuple[int, ...]], headers: Headers
) -> Iterator[Finding]:
    for index, name in enumerate(missing):
        shape = wanted[name]
        hint = ""
        if index < MAX_SHOWN:
            hint = _nearest(name, [other for other in unexpected if headers.tensors[other].shape == shape], headers)
        yield Finding("missing", name, f"{name} {list(shape)} is not in {headers.where()}{hint}")


def _unexpected(unexpected: list[str], missing: list[str], headers: Headers) -> Iterator[Finding]:
    for index, name in enumerate(unexpected):
        hint = ""
        if index < MAX_SHOWN and (close := _closest(name, missing)):
            hint = f"; perhaps it should be called {close}"
        yield Finding("unexpected", name, f"{name}, {headers.tensors[name].describe()}, is used by nothing{hint}")


def _nearest(name: str, candidates: list[str], headers: Headers) -> str:
    close = _closest(name, candidates)
    return f"; nearest there: {close}, {headers.tensors[close].describe()}" if close else ""


def _closest(name: str, candidates: list[str]) -> str | None:
    """The most similar name. Among very many only those with the same numbers (layer, expert) are compared."""
    if len(candidates) > MAX_COMPARED:
        numbers = re.findall(r"\d+", name)
        candidates = [other for other in candidates if re.findall(r"\d+", other) == numbers]
    return next(iter(difflib.get_close_matches(name, candidates[:MAX_COMPARED], n=1)), None)


def _misfits(layout: ResolvedLayout, headers: Headers, model_dtype: str) -> Iterator[Finding]:
    regions: dict[str, list[Region]] = {}
    seen: set[tuple[str, str]] = set()
    for parameter in layout.parameters:
        target = parameter.dtype_in(model_dtype)
        for leaf in leaves(parameter.source):
            header = headers.tensors.get(leaf.name)
            if header is None:
                continue
            if header.shape == leaf.shape:
                regions.setdefault(leaf.name, []).append(leaf.region)
            if (leaf.name, target) not in seen:
                seen.add((leaf.name, target))
                yield from _misfit(leaf, header, target, parameter.name)
    for name, used in regions.items():
        header = headers.tensors[name]
        if left := uncovered(header.shape, used):
            yield Finding("unused", name, f"{left} elements of {name}, {header.describe()}, are used by nothing")


def _misfit(leaf: Slice, header: TensorHeader, target: str, parameter: str) -> Iterator[Finding]:
    if header.shape != leaf.shape:
        yield Finding("shape", leaf.name, f"{leaf.name} is {header.describe()}; {parameter} needs {list(leaf.shape)}")
    if not may_load(header.dtype, target):
        yield Finding("dtype", leaf.name, f"{leaf.name} is {header.describe()}; {parameter} is held in {target}")


def _tied(layout: ResolvedLayout, headers: Headers) -> Iterator[Finding]:
    shapes = {parameter.name: parameter.shape for parameter in layout.parameters}
    for tie in layout.ties:
        header = headers.tensors.get(tie.parameter)
        if header is not None and header.shape != shapes[tie.to]:
            yield Finding(
                "tied",
                tie.parameter,
                f"{tie.parameter}, {header.describe()}, cannot be tied to {tie.to} {list(shapes[tie.to])}",
            )


def _tie_notes(
    layout: ResolvedLayout, headers: Headers, missing: Iterable[str], flags: Mapping[str, bool]
) -> Iterator[str]:
    said = ", ".join(f"{place} = {str(value).lower()}" for place, value in flags.items()) or "nowhere in the config"
    for tie in layout.ties:
        if tie.parameter in headers.tensors:
            yield f"{tie.parameter} is tied ({said}) and present all the same; it must equal {tie.to}"
    for name in missing:
        if "head" in name:
            yield f"{name} is missing: is the head tied? The config says: {said}"
    if len(set(flags.values())) > 1:
        yield f"the config contradicts itself: {said}"
