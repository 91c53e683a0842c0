"""Where the fault is: the accused module on one prompt, our evidence there, and the reference's layer to run again."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rtp_runtime.check.capture import Capture
from rtp_runtime.check.causes.evidence import Evidence, KeepingRun, Kept
from rtp_runtime.check.causes.hypothesis import Hypothesis
from rtp_runtime.check.causes.judge import Match, compare, errors
from rtp_runtime.check.causes.rerun import Rerun
from rtp_runtime.check.names import layer_of, parent_of
from rtp_runtime.check.ours import ModuleError, Schedule
from rtp_runtime.check.probe_stage import head_module
from rtp_runtime.check.probe_table import FED, INPUT, WHAT, ProbeKey, allowed
from rtp_runtime.check.reference import Reference
from rtp_runtime.check.report import Finding
from rtp_runtime.check.session import Case, Session, make_cases

MAX_TOKENS = 640
"""Prompts longer than this are not searched on."""
SEARCHED_TOKENS = 128
"""Of prompts that show the fault, the longest of at most so many tokens is searched on first."""


@dataclass(slots=True)
class Scene:
    """Everything a search for a cause looks at."""

    session: Session
    finding: Finding
    key: ProbeKey
    """The quantity whose error is to be explained."""
    layer: int | None
    rerun: Rerun
    evidence: Evidence
    before: dict[ProbeKey, float]
    """Errors of all kept quantities against the reference as it is."""
    mode: str = ""
    """The execution mode, where it is no whole prefill."""
    parts: tuple[int, ...] = ()
    """Lengths of its steps."""
    focus: str = ""
    """The module in which mistakes are looked for now."""

    @property
    def reference(self) -> Reference:
        return self.session.reference

    @property
    def base(self) -> Capture:
        return self.rerun.base

    @property
    def module_name(self) -> str:
        """The module in which mistakes are looked for."""
        return self.focus or self.suspects()[0]

    def suspects(self) -> list[str]:
        """Where the mistake may be, the likeliest first."""
        key = self.key
        holder = parent_of(key.module) if key.what == FED else key.module
        inside = [self.finding.module] if self.finding.module.startswith(f"{holder}.") else []
        names = [name for name in (*inside, holder) if name in self.reference.modules]
        return names or [self.layer_name or next(iter(self.reference.modules))]

    @property
    def module(self) -> nn.Module:
        return self.reference.modules[self.module_name]

    @property
    def layer_name(self) -> str | None:
        return next((name for name, index in self.reference.layers.items() if index == self.layer), None)

    @property
    def block_name(self) -> str:
        """The module directly in the layer that the accused one is, or stands in."""
        layer = self.layer_name
        if layer is None or not self.module_name.startswith(f"{layer}."):
            return self.module_name
        return f"{layer}.{self.module_name[len(layer) + 1 :].partition('.')[0]}"

    @property
    def error(self) -> float:
        return self.before[self.key]

    def tolerance(self, key: ProbeKey | None = None) -> float:
        return allowed(key or self.key, self.session.noise.module_tolerance)

    def wrong(self) -> list[ProbeKey]:
        """The kept quantities that differ."""
        return [key for key, error in self.before.items() if not error <= self.tolerance(key)]

    def match(self, capture: Capture, key: ProbeKey | None = None) -> Match | None:
        key = key or self.key
        try:
            return compare(self.evidence, key, self.base, capture, self.layer, self.tolerance(key))
        except (RuntimeError, ValueError, IndexError):
            return None  # the mistake left nothing that could be compared

    def run(self, hypothesis: Hypothesis) -> Capture | None:
        """The layer with this mistake; None where the mistake does not fit."""
        try:
            return self.rerun.run(hypothesis.mistake, hypothesis.late, hypothesis.other)
        except Exception:
            # A mistake that is put into foreign code may break it in any way: then it was not the one.
            return None

    def wrong_tokens(self) -> Tensor:
        """[tokens] bool: for which ours differs at the accused module."""
        pairs = self.evidence.pairs(self.key, self.base, self.layer) or []
        wrong = torch.zeros(len(self.rerun.ids), dtype=torch.bool)
        index = self.evidence.kept[self.key].values()[1]
        for ours, theirs in pairs:
            if len(ours) == len(index):
                far = (ours - theirs).norm(dim=1) > 10 * self.tolerance() * theirs.norm(dim=1)
                wrong[index[far]] = True
        return wrong

    def mended(self, capture: Capture) -> int:
        """How many kept quantities match this capture."""
        try:
            after = errors(self.evidence, capture, self.layer)
        except (RuntimeError, ValueError, IndexError):
            return 0
        return sum(error <= self.tolerance(key) for key, error in after.items())

    def wheres(self) -> str:
        """Our class to look at, with its module: "Attention in acme.model"."""
        module = self.session.model.module
        names = dict(module.named_modules())
        name = self.module_name
        while name and name not in names:
            name = parent_of(name)
        found: Any = names.get(name, module)
        while type(found).__module__.startswith(("torch.", "rtp_kernel.")) and name:
            name = parent_of(name)
            found = names.get(name, module)
        kind = type(found)
        source = inspect.getmodule(kind)
        return f"{kind.__name__} in {source.__name__ if source else kind.__module__}"

    def children(self, name: str | None = None) -> Iterator[tuple[str, nn.Module]]:
        """(dotted name, module) of everything in the accused module, itself first."""
        root = self.module_name if name is None else name
        for inner, module in self.reference.modules[root].named_modules():
            yield (f"{root}.{inner}" if inner else root), module


def make_scene(session: Session, finding: Finding) -> Scene | None:
    """The scene of a finding on the prompt that suits a search best; None where no prompt shows it."""
    ensure_cases(session)
    layer = finding.layer if finding.layer is not None else layer_of(finding.module, session.reference.layers)
    for case in _by_suitability(session.cases):
        scene = scene_of(session, finding, case, layer)
        if scene is not None:
            return scene
    return None


@dataclass(frozen=True, slots=True)
class Steps:
    """How prompts are run where that matters."""

    name: str
    prompts: Mapping[str, Sequence[int]]
    num_new_tokens: int
    schedule: Schedule
    parts: tuple[int, ...]


def scene_of(
    session: Session, finding: Finding, case: Case, layer: int | None, steps: Steps | None = None
) -> Scene | None:
    """The scene on one prompt, run whole or as `steps` say; None where nothing differs there."""
    rerun = Rerun(session.reference, case.sequence, layer)
    try:
        run = _keep(session, case, rerun, steps)
    except ModuleError:
        return None
    evidence = Evidence(run.kept, run.ties)
    before = errors(evidence, rerun.base, layer)
    wrong = [key for key, e in before.items() if not e <= allowed(key, session.noise.module_tolerance)]
    key = _accused(finding, sorted(wrong, key=run.table.rank))
    if key is None:
        return None
    scene = Scene(session, finding, key, layer, rerun, evidence, before)
    if steps is not None:
        scene.mode, scene.parts = steps.name, steps.parts
    return scene


def ensure_cases(session: Session) -> None:
    """A prompt or two, where no stage made any."""
    if session.cases:
        return
    for _ in itertools.islice(make_cases(session), 2):
        pass


def _by_suitability(cases: list[Case]) -> list[Case]:
    lengths = {case.name: len(case.sequence) for case in cases}
    fits = [case for case in cases if lengths[case.name] <= MAX_TOKENS]
    short = [case for case in fits if lengths[case.name] <= SEARCHED_TOKENS]
    rest = [case for case in fits if lengths[case.name] > SEARCHED_TOKENS]
    return sorted(short, key=lambda c: -lengths[c.name]) + sorted(rest, key=lambda c: lengths[c.name])


def _keep(session: Session, case: Case, rerun: Rerun, steps: Steps | None = None) -> KeepingRun:
    model, reference = session.model, session.reference

    def wanted(name: str) -> bool:
        found = layer_of(name, reference.layers)
        return found is None or found == rerun.layer

    # Every layer is given the reference's input, which only a whole capture has.
    capture = reference.capture(case.sequence)[1]
    captures = {case.name: capture}
    for other in session.cases if steps is not None else ():
        if other.name in steps.prompts and other.name != case.name:  # type: ignore[union-attr]
            captures[other.name] = reference.capture(other.sequence)[1]
    run = KeepingRun.over(session, captures, wanted=wanted, prompt=case.name)
    with run.attached(model.ops):
        if steps is None:
            model.run({case.name: case.sequence}, 1, keep_logits=False)
        else:
            model.run(steps.prompts, steps.num_new_tokens, steps.schedule, keep_logits=False)
    head = head_module(capture, reference.layers)
    if head is not None and wanted(head):
        kept = run.kept[ProbeKey(head)] = Kept()
        ours = model.logits(capture.calls[head].inputs[0])
        kept.add((ours,), torch.arange(capture.num_tokens))
    return run


def _accused(finding: Finding, wrong: list[ProbeKey]) -> ProbeKey | None:
    """Of the wrong quantities in execution order: what the finding names, else one in its module, else the first."""

    def is_named(key: ProbeKey) -> bool:
        if key.what in (FED, INPUT):
            return WHAT[key.what] == finding.what
        return key.module == finding.module and WHAT[key.what] == finding.what

    def is_near(key: ProbeKey) -> bool:
        module = finding.module
        return key.module == module or key.module.startswith(f"{module}.") or module.startswith(f"{key.module}.")

    inner = [key for key in wrong if key.what != INPUT or finding.what == WHAT[INPUT]]
    for choose in (is_named, is_near):
        found = next((key for key in inner if choose(key)), None)
        if found is not None:
            return found
    return next(iter(inner), None)
