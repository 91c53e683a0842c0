"""The audit stage: does the checkpoint hold what our model asks for, and does ours ask for what the reference uses?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rtp_runtime.check.names import layer_of, parent_of
from rtp_runtime.check.report import Finding, StageResult
from rtp_runtime.check.session import Session
from rtp_runtime.errors import CheckpointError

if TYPE_CHECKING:
    from rtp_runtime.weights.audit import Audit


def run_audit(session: Session) -> StageResult:
    """Audit our layouts against the headers, and the reference's parameters against its checkpoint.

    Raises:
        ModelError: a checkpoint that neither side can use: its own fault, not a difference.
        PluginError: descriptors that contradict each other.
    """
    stage = StageResult("audit")
    audit, num_layers = _best_audit(session)
    reference = session.reference
    if session.options.reference is None:
        _refuse_bad_checkpoint(session, audit)
    homes = _homes(audit)
    for item in audit.findings:
        stage.findings.append(_finding(session, item.tensor, item.kind, item.message, num_layers, homes))
    for name, reason in audit.skipped.items():
        if _is_used(session, name):
            stage.findings.append(
                _finding(session, name, "skipped", f"{name} is skipped ({reason}) and the reference uses it")
            )
    for name, target in audit.tied.items():
        if _differs(session, audit, name, target):
            message = f"{name} is in the checkpoint and differs from {target}, to which our model ties it"
            stage.findings.append(_finding(session, name, "tied", message))
    for defect in reference.defects:
        stage.findings.append(_finding(session, defect.parameter, "reference", f"{defect.parameter}: {defect.reason}"))
    stage.findings = _grouped(stage.findings)
    num_tensors = len(audit.layout.parameters)
    stage.numbers = {"parameters": num_tensors, "skipped": len(audit.skipped), "layout": audit.layout.name}
    stage.notes += audit.notes
    stage.summary = (
        f"{num_tensors} parameters, each made of tensors that are there"
        if not stage.findings
        else f"{len(stage.findings)} disagreements between the checkpoint and what it is read as"
    )
    return stage


def _grouped(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for each module and kind."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.module, finding.what), []).append(finding)
    grouped = []
    for first, *others in groups.values():
        more = f"; and {len(others)} more there" if others else ""
        grouped.append(replace(first, detail=first.detail + more))
    return grouped


def _refuse_bad_checkpoint(session: Session, audit: Audit) -> None:
    """What the reference complains of as we do is the checkpoint's fault, and nothing can be compared."""
    reference = session.reference
    complaints = {defect.parameter for defect in reference.defects} | reference.unexpected
    if reference.defects or (audit.findings and complaints.issuperset(item.tensor for item in audit.findings)):
        shown = audit.report() or "\n".join(f"  {item.parameter}: {item.reason}" for item in reference.defects[:6])
        raise CheckpointError(
            f"{session.options.model}: the checkpoint is not what the model needs, and transformers says so too.\n"
            f"{shown}\nDownload the files again, or compare with `rtp inspect --weights`."
        )


def _best_audit(session: Session) -> tuple[Audit, int]:
    """The clean audit, or the one with fewest findings; and how many layers our model has."""
    from rtp_runtime.model import load_config
    from rtp_runtime.model.assessment import find_served
    from rtp_runtime.weights.audit import audit_layout
    from rtp_runtime.weights.headers import read_headers
    from rtp_runtime.weights.resolve import resolve

    config = load_config(session.options.model)
    served = find_served(config, session.plugins)
    headers = read_headers(session.options.model)
    headers.require_data()
    audits = [
        audit_layout(resolve(layout), headers, "float32", config.tie_flags()) for layout in served.weights.layouts
    ]
    return min(audits, key=lambda audit: len(audit.findings)), len(served.states)


def _differs(session: Session, audit: Audit, tensor: str, target: str) -> bool:
    """Whether a tensor that our model does not load differs from the one that stands for it."""
    import torch
    from safetensors import safe_open

    from rtp_runtime.weights.headers import read_headers
    from rtp_runtime.weights.operations import leaves

    headers = read_headers(session.options.model)
    stands = next(leaf.name for leaf in leaves(audit.layout.by_name[target].source))
    values = []
    for name in (tensor, stands):
        with safe_open(headers.tensors[name].file, "pt") as file:
            values.append(file.get_tensor(name))
    return not torch.equal(values[0], values[1])


def _is_used(session: Session, tensor: str) -> bool:
    """Whether the reference reads the parameter of this name: what it holds for other inputs than text does not count.

    Nor does a table of values that follow from the config: whether ours are the same, numbers tell.
    """
    name = session.reference.naming.ours_of(tensor) or tensor
    return session.reference.is_parameter(name) and name in session.reference.used


def _finding(
    session: Session,
    tensor: str,
    kind: str,
    message: str,
    num_layers: int | None = None,
    homes: Mapping[str, str] | None = None,
) -> Finding:
    """Accuse the module that the tensor belongs to, or the layer where our model (`num_layers`) ends before it."""
    layers = session.reference.layers
    module = _home(session, tensor, homes or {})
    layer = layer_of(module, layers)
    if layer is not None and num_layers is not None and layer >= num_layers:
        module = next(name for name, index in layers.items() if index == layer)
    return Finding(
        stage="audit",
        module=module,
        layer=layer,
        error=math.inf,
        tolerance=0.0,
        what=f"{kind} tensor",
        detail=message,
        rank=session.rank(module) - 0.95,
    )


def _homes(audit: Audit) -> dict[str, str]:
    """Tensor -> our parameter that it goes into: a checkpoint may have names of its own."""
    from rtp_runtime.weights.operations import leaves

    return {leaf.name: parameter.name for parameter in audit.layout.parameters for leaf in leaves(parameter.source)}


def _home(session: Session, tensor: str, homes: Mapping[str, str]) -> str:
    """The module to accuse: of the tensor's own name, or of the parameter that it goes into."""
    modules = session.reference.modules
    name = session.reference.naming.ours_of(tensor) or tensor
    return owner(name if parent_of(name) in modules else homes.get(tensor, name), modules)


def owner(tensor: str, modules: Iterable[str]) -> str:
    """The reference's module to which a checkpoint tensor belongs: the deepest one that its name starts with."""
    known = set(modules)
    name = parent_of(tensor)
    while name and name not in known:
        name = parent_of(name)
    return name or parent_of(tensor) or tensor
