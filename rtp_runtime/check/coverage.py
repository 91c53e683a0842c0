"""What a check exercised, under which conditions, and with which versions."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from rtp_runtime.bridge import bridged_blocks
from rtp_runtime.check.compare import MODULE_TOLERANCE, NOISE_FACTOR, tolerance
from rtp_runtime.check.curves import original_length
from rtp_runtime.check.mode_run import affordable
from rtp_runtime.check.modes import MODES
from rtp_runtime.check.noise import SOUND
from rtp_runtime.check.options import STAGES
from rtp_runtime.check.probe_table import INPUT_FACTOR
from rtp_runtime.check.report import finite
from rtp_runtime.check.serving.logits import TOO_MUCH_OF_LOGITS
from rtp_runtime.check.serving.table import FAR_TOO_MUCH, TOO_MUCH
from rtp_runtime.check.session import Session


def describe_coverage(session: Session) -> dict[str, Any]:
    """Prompts, positions, windows, experts and kinds of layers, as plain data."""
    lengths = [len(case.prompt) for case in session.cases]
    windows = sorted({kind.window for kind in session.kinds if kind.window is not None})
    longest = max(lengths, default=0)
    common = set.intersection(*(set(kind.modules) for kind in session.kinds)) if session.kinds else set()
    return {
        "prompts": [
            {"name": case.name, "tokens": len(case.prompt), "new_tokens": len(case.continuation)}
            for case in session.cases
        ],
        "longest_prompt": longest,
        "positions": _positions(session),
        "windows": [{"window": window, "crossed_twice": longest > 2 * window} for window in windows],
        "compressed": [
            {"tokens_per_entry": ratio, "closed": longest // ratio, "closed_twice": longest // ratio >= 2}
            for ratio in sorted(session.ours.ratios if session.ours is not None else ())
        ],
        "selections": [
            {"layer": layer, "selected": chosen, "of": seen, "left_out": max(0, seen - chosen)}
            for layer, (chosen, seen) in sorted(session.selections.items())
        ],
        "experts": {
            name: {"visited": len(session.experts[name]), "of": total} for name, total in session.num_experts.items()
        },
        "chunk_ends": _chunk_ends(session),
        "kernels": {name: dict(ops) for name, ops in session.kernels.items()},
        "layer_kinds": [{"kind": kind.describe(common), "layers": list(kind.layers)} for kind in session.kinds],
        "stages": {
            "run": list(session.options.stages),
            "left_out": [s for s in STAGES if s not in session.options.stages],
        },
    }


def _positions(session: Session) -> dict[str, Any]:
    """How far the prompts reached, of how far the model may, and past the length that a rope was stretched from."""
    reached = max((len(case.sequence) for case in session.cases), default=0)
    original = original_length(session.reference.config)
    return {
        "reached": reached,
        "of": session.reference.max_positions,
        "original": original,
        "past_original": None if original is None else reached > original,
    }


def _chunk_ends(session: Session) -> dict[str, int]:
    """Tokens of a prefill chunk -> ends of such chunks inside the prompts that were run so."""
    if "modes" not in session.options.stages or not session.cases:
        return {}
    ends: dict[str, int] = {}
    for mode in MODES:
        size = mode.schedule.limits.get("max_chunk_tokens")
        if size is not None and not mode.schedule.together:
            ends[str(size)] = sum((len(case.prompt) - 1) // size for case in affordable(session, mode))
    return ends


def describe_thresholds(session: Session) -> list[dict[str, Any]]:
    """What decides: each threshold with where it applies."""
    noise = session.noise
    widened = max(noise.modules.values(), default=0.0)
    return [
        {"what": "a sub-block's output, relative error", "value": MODULE_TOLERANCE, "verdict": "WRONG"},
        {"what": "a layer's input, before it is replaced by the reference's", "value": INPUT_FACTOR * MODULE_TOLERANCE,
         "verdict": "WRONG"},
        {"what": "a sub-block's output at the module that the reference itself is least sure of",
         "value": tolerance(MODULE_TOLERANCE, widened), "verdict": "WRONG"},
        {"what": "logits, largest difference over their standard deviation", "value": noise.logits_tolerance,
         "verdict": "WRONG"},
        {"what": "times the reference's own disagreement that is always allowed", "value": NOISE_FACTOR,
         "verdict": ""},
        {"what": "distance of two greedy candidates that makes them a tie, in standard deviations",
         "value": 2 * noise.logits_tolerance, "verdict": "TIE-FLIP"},
        {"what": "tolerances by which two paths of the reference may differ", "value": SOUND,
         "verdict": "REFERENCE-INCONSISTENT"},
        {"what": "R of a sub-block in the serving dtype", "value": TOO_MUCH, "verdict": "DRIFT"},
        {"what": "R of a sub-block in the serving dtype", "value": FAR_TOO_MUCH, "verdict": "WRONG"},
        {"what": "R of the logits, where nothing is chosen", "value": TOO_MUCH_OF_LOGITS, "verdict": "DRIFT"},
        {"what": "pinned tensors and tables, bits", "value": 0.0, "verdict": "WRONG"},
    ]  # fmt: skip


def describe_conditions(session: Session) -> dict[str, Any]:
    """Dtypes, device, seeds, tolerances and the reference's disagreement with itself."""
    noise = session.noise
    worst = noise.worst_module()
    loaded = session.ours.loaded if session.ours is not None else None
    return {
        "dtype": "float32",
        "device": "cpu",
        "seed": session.options.seed,
        "fingerprint": loaded.fingerprint if loaded is not None else None,
        "bridged": bridged_blocks(loaded.module) if loaded is not None else {},
        "logits_tolerance": noise.logits_tolerance,
        "thresholds": describe_thresholds(session),
        "reference_paths": dict(noise.logits),
        "reference_inconsistent": {path: finite(found.logits_error) for path, found in noise.inconsistent.items()},
        "reference_set_aside": {path: finite(found.logits_error) for path, found in noise.set_aside.items()},
        "reference_worst_module": {"module": worst[0], "error": worst[1]} if worst else None,
    }


def describe_versions(session: Session) -> Mapping[str, str]:
    """Everything whose version could change the result."""
    versions = {"python": platform.python_version()}
    for name in ("rtp-runtime", "torch", "transformers", "safetensors"):
        versions[name] = _version(name)
    if session.ours is not None:
        definition = session.ours.loaded.definition
        versions[definition.distribution or definition.plugin] = definition.version or "not installed"
    return versions


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
