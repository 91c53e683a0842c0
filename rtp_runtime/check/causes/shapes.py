"""Causes of what cannot be compared number by number: another shape, or values that are not finite."""

from __future__ import annotations

from typing import Any

import torch

from rtp_runtime.alternatives import SHARES
from rtp_runtime.check.causes.scene import Scene
from rtp_runtime.check.report import Cause


def explain_shapes(scene: Scene) -> Cause | None:
    """A rotary table of another width; values that are not finite."""
    module: Any = scene.reference.modules.get(scene.finding.module)
    theirs = dict(module.named_buffers(recurse=False)) if module is not None else {}
    ours: dict[str, Any] = dict(scene.session.model.module.named_buffers())
    for key, wanted in theirs.items():
        mine = ours.get(f"{scene.finding.module}.{key}")
        if mine is None or "inv_freq" not in key or mine.shape == wanted.shape:
            continue
        width, own = 2 * wanted.numel(), 2 * mine.numel()
        share = own / width
        known = f" ({share:g} of the head)" if share in SHARES else ""
        return Cause(
            status="named", kind="rope-share",
            words=f"ours turns {own} dimensions of a head{known}; the reference {width}",
            fix=f"partial_rotary_factor and head_dim, where {scene.wheres()} reads them",
        )  # fmt: skip
    kept = scene.evidence.kept.get(scene.key)
    broken = kept is not None and any(not bool(torch.isfinite(t).all()) for rows in kept.ours for t in rows)
    if broken:
        return Cause(
            status="unknown",
            words=f"what our {scene.key.module} gives is not finite, from finite inputs",
            fix="memory that nobody wrote, a division by zero, or an overflow there",
        )  # fmt: skip
    return None
