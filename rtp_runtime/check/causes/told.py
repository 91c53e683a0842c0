"""Causes that a finding tells by itself: what the audit misses, what a mode fails at, what a table's dtype is."""

from __future__ import annotations

import re

import torch

from rtp_runtime.check.names import parent_of
from rtp_runtime.check.report import Cause, Finding
from rtp_runtime.check.session import Session
from rtp_runtime.check.text_stage import text_cause


def told(session: Session, finding: Finding) -> Cause | None:
    """The cause that follows from the finding alone; None where a search is needed."""
    if finding.stage == "audit":
        return _audit(session, finding)
    if finding.stage == "text":
        return text_cause(finding)
    if finding.stage == "serving":
        if "kept from step to step" in finding.what:
            return Cause(
                status="named",
                kind="precision",
                words=f"{finding.module} keeps {finding.what.split(',')[0]} in a lower precision: {finding.detail}",
                fix="the dtype in the state descriptor",
            )
        return Cause(
            status="unknown",
            words=f"{finding.module} rounds more than the reference in the serving dtype; only float32 is searched",
            fix="what the reference keeps or sums in float32 there: norms, softmax, router, states, accumulation",
        )
    if finding.stage == "pinned":
        return _dtype(finding)
    return _not_finite(session, finding)


AUDIT = {
    "missing": (
        "tensor-missing",
        "our model asks for a tensor that the checkpoint does not have",
        "the name in the weight descriptors, or a tensor that is tied or left out there",
    ),
    "unexpected": (
        "tensor-not-loaded",
        "our model reads nothing of a tensor that the checkpoint has",
        "a weight descriptor for it, or Skip with a reason if nothing needs it",
    ),
    "skipped": (
        "parameter-left-out",
        "our descriptors skip a tensor that the reference uses",
        "a weight descriptor in the place of the Skip, and its use in the model file",
    ),
    "duplicate": ("tensor-duplicate", "a tensor goes into two parameters", "one weight descriptor for each tensor"),
    "shape": (
        "tensor-shape",
        "a tensor has another shape than our model expects",
        "the sizes that the model file reads from the config",
    ),
    "dtype": ("tensor-dtype", "a tensor has another dtype than is declared", "the dtype in the weight descriptor"),
    "reference": ("reference-tensor", "the reference lacks a tensor that ours has", "what is given as --reference"),
}  # fmt: skip


def _audit(session: Session, finding: Finding) -> Cause:
    what = finding.what.removesuffix(" tensor")
    head = what == "tied" or (what == "missing" and _is_tied_there(session, finding.module))
    if head:
        return Cause(
            status="named", kind="tied-head",
            words=f"ours and the checkpoint disagree on whether {finding.module} is tied: {finding.detail}",
            fix="Tie in the weight descriptors, and tie_word_embeddings in config.json",
        )  # fmt: skip
    if "bias" in finding.detail and what in ("skipped", "unexpected", "missing"):
        return Cause(
            status="named", kind="bias-left-out",
            words=f"ours has no bias where the checkpoint has one: {finding.detail}",
            fix="bias=True of the layer in the model file, and its weight descriptor",
        )  # fmt: skip
    if what in AUDIT:
        kind, words, fix = AUDIT[what]
        return Cause(status="named", kind=kind, words=f"{words}: {finding.detail}", fix=fix)
    return Cause(status="unknown", words=finding.detail)


def _is_tied_there(session: Session, module: str) -> bool:
    """Whether the reference ties this module, its output head, to the embedding."""
    reference = session.reference
    head = reference.model.get_output_embeddings()
    tied = bool(getattr(reference.config.get_text_config(), "tie_word_embeddings", False))
    return tied and head is not None and reference.modules.get(module) is head


def _dtype(finding: Finding) -> Cause | None:
    """A table or parameter in another dtype than the reference keeps it in."""
    found = re.search(r"(torch\.\w+), the reference has (torch\.\w+)|in float32, ours is (torch\.\w+)", finding.detail)
    if found is None:
        return None
    ours, theirs = found[1] or found[3], found[2] or "torch.float32"
    name = finding.what.split(",")[0]
    return Cause(
        status="named", kind="precision",
        words=f"ours keeps {name} of {finding.module} in {ours.removeprefix('torch.')}; the reference in "
        f"{theirs.removeprefix('torch.')}",
        fix=f"register {name} in float32 whatever the model's dtype, or declare its dtype in the weight descriptors",
    )  # fmt: skip


def _not_finite(session: Session, finding: Finding) -> Cause | None:
    """Memory of ours in or around the accused module that holds no numbers."""
    if session.ours is None or finding.what == "raised":
        return None
    module = session.model.module
    names, name = dict(module.named_modules()), finding.module
    while name and name not in names:
        name = parent_of(name)
    if not name:
        return None
    for kind, held in (("parameter", names[name].named_parameters()), ("buffer", names[name].named_buffers())):
        for key, value in held:
            if not value.is_meta and value.is_floating_point() and bool(torch.isnan(value).any()):
                return Cause(
                    status="named", kind="never-written",
                    words=f"our {kind} {name}.{key} holds NaN: nothing was ever written there",
                    fix=f"a weight descriptor for {name}.{key}, or a value where it is made",
                )  # fmt: skip
    return None
