"""Everything that `rtp inspect` tells, as one JSON-like report. Reads config and headers, never the data of a tensor.

What goes wrong in one part is told there, and the other parts are told all the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtp_runtime.errors import RtpError
from rtp_runtime.model.checkpoint import resolve_checkpoint
from rtp_runtime.model.config import CONFIG_FILE, CONTEXT_KEYS, ModelConfig, load_config
from rtp_runtime.model.dtypes import choose_dtype

if TYPE_CHECKING:
    from rtp_kernel.registry import Choice
    from rtp_runtime.model.assessment import Served
    from rtp_runtime.plugins import Plugins
    from rtp_runtime.weights.audit import Audit
    from rtp_runtime.weights.headers import Headers
    from rtp_runtime.weights.resolve import Parameter

Report = dict[str, Any]

INERT = re.compile(
    r"initializer_range|use_cache|output_attentions|output_hidden_states|(use_)?return_dict|problem_type|pad_token_id"
    r"|bos_token_id|gradient_checkpointing|_name_or_path|torchscript|use_bfloat16|chunk_size_feed_forward|pruned_heads"
    r"|output_router_logits|router_aux_loss_coef|id2label|label2id|.*dropout.*"
)
"""Keys that decide nothing at inference."""

BY_RUNTIME = re.compile(
    rf"(text_config\.)?(eos_token_id|vocab_size|{'|'.join(CONTEXT_KEYS)})|(\w+\.)?(model_type|dtype)"
)
"""Keys that the runtime reads and models need not."""


def inspect_model(
    model: str, plugins: Plugins, *, dtype: str = "auto", device: str = "cpu", trust_remote_code: bool = False
) -> Report:
    """The report on a checkpoint directory, a hub id, or a bare config (a file, or a directory without weights).

    Raises ModelError when there is no readable config.
    """
    path = Path(model).expanduser()
    bare = path.is_file()
    directory = path.parent if bare else resolve_checkpoint(model)
    config = load_config(path if bare else directory, trust_remote_code=trust_remote_code)
    report: Report = {"model": str(model), "path": str(path if bare else directory), "problems": []}
    served = _try(report, "plugin", lambda: _find(config, plugins))
    headers = _try(report, "files", lambda: _headers(directory)) if not bare else None
    report["plugin"] = _plugin(served) if served else None
    report["files"] = _files(headers) if headers else []
    report["dtype"] = _try(report, "dtype", lambda: _dtype(dtype, config, headers, device))
    report["device"] = device
    if served is not None and report["dtype"] is not None:
        args = (served, report["dtype"])
        report["weights"] = _try(report, "weights", lambda: _weights(report, *args, headers))
        report["states"] = _try(report, "states", lambda: _states(*args))
        report["state_policies"] = list(served.state_policies)
        report["kernels"] = _try(report, "kernels", lambda: _kernels(report, *args, plugins, device))
    report["config"] = _config(config)
    return report


def _try(report: Report, part: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except RtpError as error:
        report["problems"].append({"part": part, "message": str(error)})
        return None


def _find(config: ModelConfig, plugins: Plugins) -> Served:
    from rtp_runtime.model.assessment import find_served

    return find_served(config, plugins)


def _headers(directory: Path) -> Headers | None:
    from rtp_runtime.weights.headers import read_headers

    entries = [path.name for path in directory.iterdir()]
    if entries and all(name.endswith((".json", ".jinja", ".txt", ".model", ".md")) for name in entries):
        return None  # a bare config
    return read_headers(directory)


def _dtype(dtype: str, config: ModelConfig, headers: Headers | None, device: str) -> str:
    from rtp_runtime.weights.headers import Headers as NoHeaders

    return choose_dtype(dtype, config, headers or NoHeaders(Path(), (), {}), device)


def _config(config: ModelConfig) -> Report:
    unread = config.unread_keys()
    inert = [key for key in unread if INERT.fullmatch(key.rpartition(".")[2])]
    known = [key for key in unread if BY_RUNTIME.fullmatch(key)]
    return {
        "file": str(config.path or CONFIG_FILE),
        "architecture": config.architecture,
        "model_type": config.model_type,
        "known_to_transformers": hasattr(config.hf, "transformers_version"),
        "read": {key: _finite(value) for key, value in config.read_values().items()},
        "unread": [key for key in unread if key not in inert and key not in known],
        "inert": inert,
        "tied": config.tie_flags(),
    }


def _finite(value: Any) -> Any:
    """Python's JSON knows Infinity and NaN, which configs use and JSON forbids."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _plugin(served: Served) -> Report:
    definition = served.definition
    return {
        "name": definition.plugin,
        "distribution": definition.distribution,
        "version": definition.version,
        "target": str(definition.target),
    }


def _files(headers: Headers) -> list[Report]:
    return [
        {
            "file": file.path.name,
            "bytes": file.data_end,
            "tensors": len(file.tensors),
            "data": "missing" if file.truncated else "present",
        }
        for file in headers.files
    ]


def _weights(report: Report, served: Served, dtype: str, headers: Headers | None) -> Report:
    from rtp_runtime.weights.audit import MAX_SHOWN, audit_layouts, pick_layout
    from rtp_runtime.weights.resolve import resolve

    if headers is None:
        layout = resolve(served.weights.layouts[0])
        return {"layout": layout.name, "clean": None, "parameters": list(_parameters(layout.parameters, dtype, None))}
    audits = audit_layouts(served.weights, headers, dtype, served.config.tie_flags())
    chosen = _try(report, "weights", lambda: pick_layout(audits, headers)) or audits[0]
    found: Report = {"layout": chosen.layout.name, "clean": chosen.clean, "audits": []}
    for audit in audits:
        found["audits"].append(_audit(audit, None if audit is audits[0] else MAX_SHOWN))
    if chosen.clean:
        found["plan"] = _plan(chosen, headers)
    found["parameters"] = list(_parameters(chosen.layout.parameters, dtype, headers))
    return found


def _audit(audit: Audit, max_findings: int | None) -> Report:
    return {
        "layout": audit.layout.name,
        "clean": audit.clean,
        "num_findings": len(audit.findings),
        "findings": [asdict(finding) for finding in audit.findings[:max_findings]],
        "skipped": dict(audit.skipped),
        "ties": {tie.parameter: tie.to for tie in audit.layout.ties},
        "notes": list(audit.notes),
    }


def _plan(audit: Audit, headers: Headers) -> Report:
    from rtp_runtime.weights.plan import plan_load

    plan = plan_load(audit.layout, headers)
    return {
        "bytes_read": plan.num_bytes,
        "bytes_kept": plan.kept_bytes,
        "reads": [
            {"file": read.tensor.file.name, "tensor": read.tensor.name, "start": read.start, "bytes": read.num_bytes}
            for read in plan.reads
        ],
    }


def _parameters(parameters: tuple[Parameter, ...], dtype: str, headers: Headers | None) -> Iterator[Report]:
    from rtp_runtime.weights.operations import leaves

    for parameter in parameters:
        names = list(dict.fromkeys(leaf.name for leaf in leaves(parameter.source)))
        found = {headers.tensors[name].dtype for name in names if name in headers.tensors} if headers else set()
        yield {
            "name": parameter.name,
            "shape": list(parameter.shape),
            "dtype": parameter.dtype_in(dtype),
            "pinned": parameter.dtype != "model",
            "stored": sorted(found),
            "tensors": names,
        }


def _states(served: Served, dtype: str) -> list[Report]:
    from rtp_runtime.state.capacity import describe_states
    from rtp_runtime.state.grouping import group_states

    return [
        {
            "kind": spec.kind,
            "window": spec.window,
            "block_size": spec.block_size,
            "forced_by": spec.forced_by,
            "bytes": spec.block_bytes,
            "bytes_per_token": spec.block_bytes / spec.block_size if spec.block_size else 0,
            "states": list(describe_states(spec)),
            "reuse": spec.reuse,
            "retention": None if spec.retention is None else asdict(spec.retention),
            "capacity": spec.capacity,
        }
        for spec in group_states(served.states, cache_dtype=dtype)
    ]


def _kernels(report: Report, served: Served, dtype: str, plugins: Plugins, device: str) -> list[Report]:
    import torch

    from rtp_runtime.bridge import bridged_blocks
    from rtp_runtime.model.building import bind_module, build_module, common_block_size, make_op_table
    from rtp_runtime.weights.dtypes import torch_dtype

    run_dtype = torch_dtype(dtype)
    module = build_module(served.definition, served.implementation, served.config, run_dtype)
    report["bridged"] = [{"block": name, "target": target} for name, target in bridged_blocks(module).items()]
    block_size = common_block_size(served.states, dtype, None)
    ops = make_op_table(plugins, device, run_dtype, block_size=block_size)
    bind_module(served.definition, module, ops, torch.device(device), run_dtype)
    return list(_grouped(ops.choices))


def _grouped(choices: list[Choice]) -> Iterator[Report]:
    """Choices of equal op, regime and outcome as one entry."""
    groups: dict[Any, list[str]] = {}
    for choice in choices:
        groups.setdefault((choice.op, choice.regime, choice.implementation, choice.refused), []).append(
            choice.component
        )
    for (op, regime, implementation, refused), components in groups.items():
        yield {
            "op": op,
            "regime": regime,
            "implementation": implementation,
            "refused": [{"implementation": name, "reasons": list(reasons)} for name, reasons in refused],
            "components": len(components),
            "for": components[0],
        }
