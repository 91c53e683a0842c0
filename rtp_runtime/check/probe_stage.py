"""The probes stage: every sub-block of ours against the reference's, each given the reference's layer input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rtp_runtime.bridge import bridged_blocks
from rtp_runtime.check.capture import Capture
from rtp_runtime.check.curves import module_curves
from rtp_runtime.check.names import find_layers, holds_layers, is_inside, layer_of, parent_of, relative_name
from rtp_runtime.check.ours import ModuleError
from rtp_runtime.check.probe_table import ProbeKey, ProbeTable
from rtp_runtime.check.probes import ProbeRun
from rtp_runtime.check.report import Finding, NotJudged, StageResult
from rtp_runtime.check.rows import RowMatcher
from rtp_runtime.check.session import Case, Session
from rtp_runtime.check.splits import FusedOutputs
from rtp_runtime.check.structure import extra_modules, without_counterpart

BRIDGED = "transformers' own code in our model: of its block, only state and scheduling are judged"
ABSENT = "our model calls no module of this name, and no fused layer that it is a part of"


class ProbeStage:
    """Collects probes prompt by prompt; `finish` judges them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._table: ProbeTable | None = None
        self._failures: list[Finding] = []
        self._called: list[str] = []
        """The reference's modules that ran, in order."""
        self._repeated: set[str] = set()
        """Those that ran more than once, as a rotary module with a table for each kind of layer."""
        self._fused: FusedOutputs | None = None

    def add(self, case: Case, capture: Capture) -> None:
        """Probe our model on one prompt."""
        session, model = self._session, self._session.model
        if self._table is None:
            self._table = ProbeTable(session.reference.layers, session.order, session.consumers)
            self._fused = FusedOutputs(model.module, model.loaded.weights.layout, set(capture.calls))
        assert self._fused is not None
        matcher = RowMatcher({case.name: case.sequence})
        run = ProbeRun(model.module, self._table, {case.name: capture}, matcher, self._fused, model.ratios)
        try:
            with run.attached(model.ops):
                model.run({case.name: case.sequence}, 1, keep_logits=False)
            self._judge_head(case, capture)
        except ModuleError as failure:
            self._failures.append(raised(session, failure, "probes", f"while it ran {case.name}"))
        session.first_ties |= run.tie_tokens
        session.note_selections(run.seam.exercised)
        self._called = list(capture.calls)
        self._repeated |= capture.repeated

    def _judge_head(self, case: Case, capture: Capture) -> None:
        """The output head on the reference's own last hidden state."""
        assert self._table is not None
        head = head_module(capture, self._session.reference.layers)
        if head is None:
            return
        import torch

        from rtp_runtime.check.pairs import pair_tensors

        call, index = capture.calls[head], torch.arange(capture.num_tokens)
        probe = self._table.probe(ProbeKey(head), case.name)
        ours = self._session.model.logits(call.inputs[0])
        probe.add(pair_tensors([ours], [case.logits]), index, torch.ones(len(index), dtype=torch.bool))

    def finish(self) -> StageResult:
        """Judge what was collected."""
        stage = StageResult("probes")
        table, tolerance = self._table, self._session.noise.module_tolerance
        if table is None:
            stage.not_judged.append(NotJudged("sub-blocks", "no prompt was run", required=True))
            return stage
        stage.measures = table.measures(tolerance)
        absent = without_counterpart(
            self._session.reference.modules, self._called, table.layers, table.judged_modules()
        )
        stage.findings = [*self._failures, *self._blame_absent(table.findings(tolerance, "probes"), absent)]
        ours = find_layers(self._session.model.module)
        stage.findings += [self._odd_layer(name, "the reference") for name in table.layers if name not in ours]
        stage.findings += [self._odd_layer(name, "our model") for name in ours if name not in table.layers]
        accused = [finding.module for finding in sorted(stage.findings, key=lambda f: (not f.cause, f.rank))]
        stage.curves = module_curves(self._session, table, tolerance, accused)
        self._note_absent(stage, absent)
        for layer, (chosen, seen) in self._session.selections.items():
            if seen <= chosen:
                why = f"it left nothing out: {chosen} of {seen} places; the prompts are too short for it"
                stage.not_judged.append(NotJudged(f"the selection of layer {layer}", why))
        for what in ("experts", "places"):
            if table.num_ties(what):
                stage.num_ties += table.num_ties(what)
                stage.notes.append(
                    f"TIE-FLIP: other {what} for {table.num_ties(what)} tokens whose scores are equal within noise"
                )
        judged = [measure for measure in stage.measures if not measure.error > measure.tolerance]
        worst = max(stage.measures, key=lambda measure: measure.error / measure.tolerance, default=None)
        if worst is not None:
            stage.numbers = {
                "probes": len(stage.measures),
                "matching": len(judged),
                "worst_error": worst.error,
                "worst": worst.name,
            }
            where = f"worst {worst.error:.1e} at {worst.name} ({worst.column})"
            stage.summary = f"{len(judged)} of {len(stage.measures)} quantities match; {where}"
        return stage

    def _note_absent(self, stage: StageResult, absent: Sequence[str]) -> None:
        layers, bridged = self._session.reference.layers, bridged_blocks(self._session.model.module)
        for name in absent:
            layer = next((prefix for prefix in layers if name.startswith(f"{prefix}.")), None)
            direct = layer is not None and "." not in name[len(layer) + 1 :]
            # What a module outside the layers gives in several calls is judged where it is used, and so is a table.
            held = any(True for _ in self._session.reference.modules[name].parameters())
            outside = layer_of(name, layers) is None and name not in self._repeated and held
            if is_inside(name, bridged):
                continue
            stage.not_judged.append(NotJudged(name, ABSENT, required=direct or outside))
        stage.not_judged += [NotJudged(name, f"{BRIDGED} ({target})") for name, target in bridged.items()]

    def _odd_layer(self, name: str, who: str) -> Finding:
        session = self._session
        return Finding(
            stage="probes", module=name, layer=int(name.rpartition(".")[2]), error=math.inf, tolerance=0.0,
            what="the layer", detail=f"only {who} has this layer", rank=session.rank_after_layers() - 0.7,
        )  # fmt: skip

    def _blame_absent(self, findings: list[Finding], absent: Sequence[str]) -> list[Finding]:
        """Where a module is at fault and one inside it exists on one side only, that one is the fault."""
        session, model = self._session, self._session.model
        assert self._fused is not None
        extra = extra_modules(model.module, set(self._called), self._fused.names())
        extra = [name for name in extra if name not in session.reference.modules]
        missing = self._suspects(absent, {finding.module for finding in findings})
        return [_blame(finding, missing, extra) for finding in findings]

    def _suspects(self, absent: Sequence[str], wrong: set[str]) -> list[str]:
        """Of the modules that ours does not call, those that may be at fault.

        Not those that are called and only give nothing comparable, nor those that hold no parameters, nor those that
        are absent in layers that match too, as an up-projection that attention takes the weight of.
        """
        assert self._table is not None
        session, layers = self._session, self._table.layers
        called, right = self._table.called_modules(), [name for name in absent if parent_of(name) not in wrong]
        innocent = {relative_name(name, layers) for name in right}
        held = [name for name in absent if any(True for _ in session.reference.modules[name].parameters())]
        return [name for name in held if name not in called and relative_name(name, layers) not in innocent]


def _blame(finding: Finding, absent: Sequence[str], extra: Sequence[str]) -> Finding:
    if not finding.cause:
        return finding
    for names, detail in ((absent, "our model calls no such module"), (extra, "the reference has no such module")):
        inside = [name for name in names if name.startswith(f"{finding.module}.")]
        if inside:
            return replace(
                finding,
                module=inside[0],
                detail=f"{detail}; {finding.what} of {finding.module} differs; {finding.detail}",
            )
    return finding


def head_module(capture: Capture, layers: dict[str, int] | object) -> str | None:
    """The last module that the reference called: what makes logits of the last hidden state."""
    names = [name for name in capture.order if name in capture.calls]
    last = names[-1] if names else None
    return last if last is not None and not holds_layers(last, layers) and last not in layers else None  # type: ignore[arg-type, operator]


def raised(session: Session, failure: ModuleError, stage: str, where: str) -> Finding:
    """The finding for a model that raised while it ran."""
    module = failure.module or "model"
    return Finding(
        stage=stage, module=module, layer=layer_of(module, session.reference.layers), error=math.inf, tolerance=0.0,
        what="raised", detail=f"{failure} {where}", rank=session.rank(module) - 0.9,
    )  # fmt: skip
