"""Gathers ratios prompt by prompt, and judges them when all prompts have run."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from rtp_runtime.check.names import layer_of
from rtp_runtime.check.ours import OurModel
from rtp_runtime.check.probe_stage import head_module
from rtp_runtime.check.reference import Reference
from rtp_runtime.check.report import DRIFT, Finding, Measure, NotJudged, StageResult
from rtp_runtime.check.serving.common import find_common
from rtp_runtime.check.serving.floors import path_ratios
from rtp_runtime.check.serving.logits import TOO_MUCH_OF_LOGITS, LogitsRatios
from rtp_runtime.check.serving.ratio import Ratio, rounding_unit
from rtp_runtime.check.serving.runs import Flips, ServingRun, Twin, capture_twin
from rtp_runtime.check.serving.states import NarrowState, narrow_states
from rtp_runtime.check.serving.table import TOO_MUCH, RatioProbe, RatioTable
from rtp_runtime.check.session import Session
from rtp_runtime.check.splits import FusedOutputs


class ServingJudge:
    """Holds the two references and our model in the serving dtype."""

    def __init__(self, session: Session, narrow: Reference, ours: OurModel) -> None:
        self._session, self._narrow, self.ours = session, narrow, ours
        reference = session.reference
        unit = rounding_unit(narrow.dtype)
        self._eps = float(torch.finfo(narrow.dtype).eps)
        self._table = RatioTable(reference.layers, session.order, session.consumers, unit)
        self._fused = FusedOutputs(ours.module, ours.loaded.weights.layout, set(session.order))
        self._flips: dict[int, Flips] = {}
        self._logits = LogitsRatios(Ratio(unit))
        self._last: Twin | None = None
        self._mixers: set[str] = set()
        self._tokens = self._prompts = 0

    @functools.cached_property
    def _head(self) -> str | None:
        reference = self._session.reference
        return head_module(reference.capture(reference.few_tokens)[1], reference.layers)

    @functools.cached_property
    def _given(self) -> dict[str, str]:
        """Our modules -> the reference's whose input they are given, in all runs."""
        return find_common(self._session.reference, self.ours, self._fused, self._head)

    @functools.cached_property
    def _fixed(self) -> list[str]:
        """The reference's modules that are given the same in all runs."""
        return list(dict.fromkeys([*self._given.values(), *([self._head] if self._head else [])]))

    def add(self, prompt: str, ids: tuple[int, ...]) -> None:
        """Run one prompt.

        Raises:
            ModuleError: our model raised.
            RuntimeError, ValueError, TypeError: the reference cannot run in this dtype.
        """
        model = self.ours
        twin = capture_twin(prompt, ids, self._session.reference, self._narrow, self._fixed)
        run = ServingRun(model, self._table, twin, self._fused, self._given)
        with run.attached(model.ops):
            model.run({prompt: ids}, 1, keep_logits=False)
        if self._head is not None:
            run.judge_head(self._head, model)
        self._mixers |= run.seam.mixers
        self._note_flips(twin, run)
        if self._session.reference.is_small or not self._prompts:
            self._add_logits(prompt, ids)
        self._last, self._tokens, self._prompts = twin, self._tokens + len(ids), self._prompts + 1

    def _add_logits(self, prompt: str, ids: tuple[int, ...]) -> None:
        """The whole model, with nothing put in."""
        ours = self.ours.run({prompt: ids}, 1)[prompt].logits[: len(ids)]
        narrow, exact = self._narrow.logits(ids), self._session.reference.logits(ids)
        if ours.shape == exact.shape:
            self._logits.add(ours, narrow, exact)

    def _note_flips(self, twin: Twin, run: ServingRun) -> None:
        for layer in twin.flips.keys() | run.flips.keys():
            total, found = self._flips.setdefault(layer, Flips()), run.flips.get(layer, Flips())
            total.ours += found.ours
            total.gaps += found.gaps
            total.reference += int(twin.flips[layer].sum()) if layer in twin.flips else 0
            total.tokens += len(twin.ids)

    def finish(self, stage: StageResult) -> None:
        """Judge what was gathered."""
        table, floors = self._table, {}
        if table.findings(lambda _: TOO_MUCH, "serving"):
            floors = self._floors()
        allowed = functools.partial(_allowed, floors)
        stage.measures = table.measures(allowed)
        stage.findings += table.findings(allowed, "serving")
        try:
            stage.findings += [self._state_finding(state) for state in narrow_states(self._narrow, self.ours)]
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
            stage.not_judged.append(NotJudged("the dtype of the states", str(error).partition("\n")[0]))
        self._judge_logits(stage)
        self._say_flips(stage)
        above = {name: (path, value) for name, (path, value) in floors.items() if value > TOO_MUCH}
        for name, (path, value) in sorted(above.items(), key=lambda item: -item[1][1])[:3]:
            stage.notes.append(f"{name}: the reference's {path} gives R {value:.2f} itself; more is judged there")
        self._sum_up(stage)

    def _state_finding(self, state: NarrowState) -> Finding:
        layers = self._session.reference.layers
        inside = [name for name in self._mixers if layer_of(name, layers) == state.layer]
        module = min(inside, default=next(name for name, index in layers.items() if index == state.layer))
        return Finding(
            stage="serving",
            module=module,
            layer=state.layer,
            error=state.factor,
            tolerance=1.0,
            what=f"the state {state.name!r}, kept from step to step: its unit in the last place",
            detail=f"ours is {state.ours}, the reference's is {state.reference}".replace("torch.", ""),
            rank=self._session.rank(module) - 0.9,
            verdict=DRIFT,
        )

    def _floors(self) -> dict[str, tuple[str, float]]:
        """Module -> the reference's other path with the largest R there, and that."""
        found: dict[str, tuple[str, float]] = {}
        assert self._last is not None
        unsound = self._session.noise.inconsistent
        for path, ratios in path_ratios(self._narrow, self._last, self._fixed, unsound):
            for name, value in ratios.items():
                if math.isfinite(value) and value > found.get(name, ("", 0.0))[1]:
                    found[name] = path, value
        return found

    def _judge_logits(self, stage: StageResult) -> None:
        session, ratio = self._session, self._logits.ratio
        if not ratio.num_tokens and not ratio.broken:
            return
        stage.numbers |= self._logits.numbers()
        allowed = TOO_MUCH_OF_LOGITS * ratio.allowance
        chooses = bool(session.experts or session.selections or self._flips)
        stage.measures.append(Measure("logits", None, "logits R", ratio.measured, math.inf if chooses else allowed))
        if chooses or ratio.measured <= allowed or stage.findings:
            return
        stage.findings.append(_logits_finding(session, ratio.measured, allowed))

    def _say_flips(self, stage: StageResult) -> None:
        for key, probe in self._table.probes():
            layer = layer_of(key.module, self._table.layers)
            if layer is not None:
                self._flips.setdefault(layer, Flips()).gaps += _gaps(probe)
        if not self._flips:
            return
        stage.numbers["flips"] = {str(layer): self._flip_numbers(self._flips[layer]) for layer in sorted(self._flips)}
        ours, theirs = (sum(getattr(flips, side) for flips in self._flips.values()) for side in ("ours", "reference"))
        if ours or theirs:
            widest = max((gap for flips in self._flips.values() for gap in flips.gaps), default=None)
            apart = f"; the scores that changed places were at most {widest[0]:.1e} apart" if widest else ""
            stage.notes.append(
                f"rounding changed what was chosen {ours} times in ours and {theirs} times in the reference, "
                f"over {self._tokens} tokens of {len(self._flips)} layers{apart}"
            )
        judged = {measure.layer for measure in stage.measures}
        for layer, flips in self._flips.items():
            if layer not in judged:
                why = f"rounding changed what was chosen for all of its {flips.tokens} tokens"
                stage.not_judged.append(NotJudged(f"rounding in layer {layer}", why))

    def _flip_numbers(self, flips: Flips) -> dict[str, Any]:
        numbers: dict[str, Any] = {"ours": flips.ours, "reference": flips.reference, "tokens": flips.tokens}
        if flips.gaps:
            numbers["largest_gap"] = max(gap for gap, _ in flips.gaps)
            numbers["largest_gap_in_units"] = max(gap / self._unit_of(size) for gap, size in flips.gaps)
        return numbers

    def _unit_of(self, size: float) -> float:
        """The unit in the last place of the serving dtype at a score of this size."""
        return float(self._eps * 2.0 ** math.floor(math.log2(size))) if size else self._eps

    def _sum_up(self, stage: StageResult) -> None:
        ratios = [measure for measure in stage.measures if math.isfinite(measure.tolerance)]
        worst = max(ratios, key=lambda measure: measure.error / measure.tolerance, default=None)
        stage.numbers |= {"prompts": self._prompts, "tokens": self._tokens, "modules": len(ratios)}
        if worst is None:
            stage.not_judged.append(NotJudged("rounding", "no sub-block could be compared in the serving dtype"))
            return
        stage.numbers |= {"worst_ratio": worst.error, "worst": worst.name}
        good = sum(measure.ok for measure in ratios)
        stage.summary = (
            f"{good} of {len(ratios)} quantities round no worse in {stage.numbers['serving_dtype']} than the "
            f"reference's; largest R {worst.error:.2f} at {worst.name}, over {self._tokens} tokens"
        )


def _logits_finding(session: Session, measured: float, allowed: float) -> Finding:
    return Finding(
        stage="serving",
        module=session.order[-1] if session.order else "model",
        layer=None,
        error=measured,
        tolerance=allowed,
        what="logits of the whole model: rounding, in units of the reference's",
        detail="no sub-block does it alone",
        cause=False,
        rank=len(session.order) + 1.0,
        verdict=DRIFT,
    )


def _allowed(floors: dict[str, tuple[str, float]], module: str) -> float:
    """R that is allowed at a module: no less than what another path of the reference has there."""
    return TOO_MUCH * max(1.0, floors.get(module, ("", 1.0))[1])


def _gaps(probe: RatioProbe) -> list[tuple[float, float]]:
    rows = [row for gaps in probe.gaps for row in gaps.tolist()]
    return [(high - low, max(abs(low), abs(high))) for low, high in rows if math.isfinite(high - low)]
