"""Why a module differs: known mistakes, each tried on the reference and compared with our error.

The accused layer of the reference is run again with one mistake in it. A mistake is the cause if ours then matches
within the float32 tolerance, or if our error is its effect times one; otherwise it is at most the closest.
"""

from __future__ import annotations

import math

from rtp_runtime.check.causes.modes import mode_scene, told_by_mode
from rtp_runtime.check.causes.scene import Scene, make_scene
from rtp_runtime.check.causes.search import Search, Tried
from rtp_runtime.check.causes.shapes import explain_shapes
from rtp_runtime.check.causes.told import told
from rtp_runtime.check.report import Cause, Finding
from rtp_runtime.check.session import Session

CLOSE = 0.7
"""A mistake that leaves more than this share of the error is not even the closest."""


def explain(session: Session, finding: Finding) -> Cause | None:
    """The mistake that explains the first wrong finding; None where nothing can be tried."""
    try:
        return _explain(session, finding)
    except Exception as error:
        # Mistakes are put into foreign code. Whatever breaks there, the verdict stands.
        return Cause(status="unknown", words=f"the search for a cause failed: {type(error).__name__}: {error}")


def _explain(session: Session, finding: Finding) -> Cause | None:
    cause = told(session, finding)
    if cause is not None or session.ours is None or session.reference.is_outline:
        return cause
    if finding.what == "raised":
        return Cause(status="unknown", words=f"our model raised: {finding.detail}", fix="the line that the error names")
    scene = make_scene(session, finding) or mode_scene(session, finding)
    if scene is None:
        return told_by_mode(finding) or unknown(
            finding,
            "given the reference's input every module matches; look at what the engine feeds, keeps and returns",
        )
    if math.isinf(scene.error) or math.isinf(finding.error):
        found = explain_shapes(scene)
        if found is not None or math.isinf(scene.error):
            return found or unknown(finding, "what it gives cannot be compared")
    search = Search(scene)
    search.run()
    return _cause(search, scene, finding)


def unknown(finding: Finding, why: str) -> Cause:
    """No known cause, with module and numbers."""
    where = f"{finding.module} (relative error {finding.error:.2e}, allowed {finding.tolerance:.1e})"
    return Cause(status="unknown", words=f"{where}: {why}")


def _cause(search: Search, scene: Scene, finding: Finding) -> Cause:
    best = search.best()
    if best:
        return _told(best[0], "named", _others(best))
    if search.closest is not None and search.closest.match.remaining < CLOSE * scene.error:
        return _told(search.closest, "closest", "")
    if search.too_small is not None and search.closest is None:
        return _told(search.too_small, "not judged", "; its effect is too small to be told from rounding")
    by_mode = told_by_mode(finding) if scene.mode else None
    if by_mode is not None:
        return by_mode
    why = f"{search.tried} mistakes were tried at {scene.key.module}" + (
        ", and time was over" if search.out_of_time else ""
    )
    return unknown(finding, why)


def _others(best: list[Tried]) -> str:
    """Mistakes that would give the same numbers here."""
    first = best[0]
    same = [
        each.hypothesis.words
        for each in best[1:]
        if each.match.exact == first.match.exact
        and each.hypothesis.kind != first.hypothesis.kind
        and each.hypothesis.cost <= first.hypothesis.cost + 0.35
    ]
    words = list(dict.fromkeys(same))[:2]
    return f". The same here: {'; or '.join(words)}" if words else ""


def _told(tried: Tried, status: str, more: str) -> Cause:
    match, hypothesis = tried.match, tried.hypothesis
    return Cause(
        status=status,  # type: ignore[arg-type]
        kind=hypothesis.kind,
        words=hypothesis.words + more,
        fix=hypothesis.fix,
        coefficient=match.coefficient,
        remaining=match.remaining,
        effect=match.effect,
    )
