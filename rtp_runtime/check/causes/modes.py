"""Causes of what fails only in some execution mode: the scene there, and what the mode alone tells."""

from __future__ import annotations

from rtp_runtime.check.causes.scene import Scene, Steps, scene_of
from rtp_runtime.check.mode_run import Mode, affordable, new_tokens
from rtp_runtime.check.modes import MODES
from rtp_runtime.check.names import layer_of
from rtp_runtime.check.report import Cause, Finding
from rtp_runtime.check.session import Session

TOLD = (
    ("one token at a time", "state-in-decode", "a step of one token does not continue what was computed before"),
    ("chunk", "state-across-chunks", "what a chunk leaves is not carried right into the next"),
    ("mixed", "mixed-batch", "prefill and decode in one step disturb each other"),
    ("preempt", "state-after-preemption", "what a preempted request computed is not made again as it was"),
    ("prefix", "state-from-prefix", "what is kept for a prefix is not what computing it gives"),
    ("snapshot", "state-from-snapshot", "what a snapshot restores is not what was saved"),
)


def mode_scene(session: Session, finding: Finding) -> Scene | None:
    """The scene of a finding in the mode that it names; None where nothing differs there."""
    mode = max((mode for mode in MODES if mode.name in finding.detail), key=lambda mode: len(mode.name), default=None)
    if mode is None or finding.stage != "modes":
        return None
    layer = finding.layer if finding.layer is not None else layer_of(finding.module, session.reference.layers)
    cases = affordable(session, mode)
    for case in sorted(cases, key=lambda case: case.name not in finding.detail):
        prompts = (
            {each.name: each.prompt.ids for each in cases} if mode.schedule.together else {case.name: case.prompt.ids}
        )
        steps = Steps(
            mode.name,
            prompts,
            new_tokens(session, mode),
            mode.schedule,
            _parts(mode, len(case.prompt), len(case.sequence)),
        )
        scene = scene_of(session, finding, case, layer, steps)
        if scene is not None:
            return scene
    return None


def _parts(mode: Mode, prompt: int, tokens: int) -> tuple[int, ...]:
    """Lengths of the steps in which a request runs alone."""
    chunk = int(mode.schedule.limits.get("max_chunk_tokens", prompt))
    chunks = [min(chunk, prompt - start) for start in range(0, prompt, chunk)]
    return (*chunks, *[1] * (tokens - prompt))


def told_by_mode(finding: Finding) -> Cause | None:
    """What the mode that fails tells by itself."""
    if finding.stage not in ("modes", "greedy", "logits", "serving"):
        return None
    for name, kind, words in TOLD:
        if name in finding.detail:
            return Cause(
                status="closest", kind=kind,
                words=f"a whole prefill matches; in the mode that failed {words}, in {finding.module}",
                fix=f"the state that {finding.module} reads and writes: its state descriptor, and the op that is given "
                "the batch",
            )  # fmt: skip
    return None
