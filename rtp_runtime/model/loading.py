"""From a checkpoint to a module that computes: resolve, audit, build on the meta device, load, prepare.

Whatever can be refused is refused from the config and the headers, before memory is taken.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from rtp_kernel.components import prepare_components
from rtp_kernel.registry import OpTable
from rtp_runtime.errors import ModelError, UsageError
from rtp_runtime.model.assessment import find_served
from rtp_runtime.model.building import (
    bind_module,
    build_module,
    check_described,
    check_made,
    common_block_size,
    make_op_table,
    set_tensor,
)
from rtp_runtime.model.checkpoint import resolve_checkpoint
from rtp_runtime.model.config import ModelConfig, load_config
from rtp_runtime.model.dtypes import choose_dtype
from rtp_runtime.model.registry import ModelDefinition
from rtp_runtime.plugins import Plugins, load_plugins
from rtp_runtime.state.descriptors import StateDescriptors
from rtp_runtime.weights.audit import choose_layout
from rtp_runtime.weights.dtypes import torch_dtype
from rtp_runtime.weights.headers import Headers, read_headers
from rtp_runtime.weights.loaded import LoadedWeights
from rtp_runtime.weights.loader import Progress, allocate, load_weights, verify_ties
from rtp_runtime.weights.plan import plan_load
from rtp_runtime.weights.resolve import ResolvedLayout


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LoadedModel:
    """A model that is ready to compute, and all that is known about how it came to be."""

    module: nn.Module
    config: ModelConfig
    definition: ModelDefinition
    weights: LoadedWeights
    states: StateDescriptors
    dtype: torch.dtype
    device: torch.device
    ops: OpTable
    fingerprint: str
    """SHA-256 of the config and all headers."""
    path: Path
    state_policies: Mapping[str, StateDescriptors] = field(default_factory=dict)
    """Other ways to keep the state, by the name under which a plugin has registered them."""


def load_model(
    model: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    plugins: Plugins | None = None,
    ops: OpTable | None = None,
    deterministic: bool = False,
    block_size: int | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a checkpoint (a directory, or a hub id) into the module that a plugin provides for its architecture.

    `ops` decides which implementations components get; by default everything installed that reads blocks of
    `block_size` tokens, the size that engines will use, and with `deterministic` only what computes a row whatever its
    company. `progress` is called with bytes read and bytes in all.

    Raises ModelError (config, checkpoint, architecture), PluginError, KernelError, UsageError.
    """
    target = _device(device)
    path = resolve_checkpoint(model)
    config = load_config(path, trust_remote_code=trust_remote_code)
    plugins = load_plugins() if plugins is None else plugins
    served = find_served(config, plugins)
    headers = read_headers(path)
    headers.require_data()
    dtype_name = choose_dtype(dtype, config, headers, target.type)
    run_dtype = torch_dtype(dtype_name)
    audit = choose_layout(served.weights, headers, dtype_name, config.tie_flags())
    weights = LoadedWeights(headers, audit, plan_load(audit.layout, headers))
    module = build_module(served.definition, served.implementation, config, run_dtype)
    check_described(served.definition, module, audit.layout, dtype_name)
    if ops is None:
        common = common_block_size(served.states, dtype_name, block_size)
        ops = make_op_table(plugins, target.type, run_dtype, deterministic=deterministic, block_size=common)
    bind_module(served.definition, module, ops, target, run_dtype)
    fill_module(module, weights, dtype_name, target, progress)
    check_made(served.definition, module)
    prepare_components(module)
    return LoadedModel(
        module.eval(),
        config,
        served.definition,
        weights,
        served.states,
        run_dtype,
        target,
        ops,
        fingerprint(config, headers),
        path,
        served.state_policies,
    )


def fill_module(
    module: nn.Module, weights: LoadedWeights, model_dtype: str, device: torch.device, progress: Progress | None = None
) -> None:
    """Give a module on the meta device its parameters. Raises ModelError (no memory) or CheckpointError."""
    layout = weights.layout
    tensors = _allocate_all(layout, model_dtype, device)
    load_weights(layout, weights.plan, tensors, progress)
    verify_ties(weights.audit.tied, weights.headers, tensors)
    for name, tensor in tensors.items():
        set_tensor(module, name, tensor)
    for tie in layout.ties:
        set_tensor(module, tie.parameter, tensors[tie.to])


def fingerprint(config: ModelConfig, headers: Headers) -> str:
    """SHA-256 of what decides the computation apart from the values: config and headers."""
    canonical = json.dumps(config.raw, sort_keys=True)
    return hashlib.sha256(f"{canonical}\n{headers.fingerprint()}".encode()).hexdigest()


def _allocate_all(layout: ResolvedLayout, model_dtype: str, device: torch.device) -> dict[str, Tensor]:
    dtypes = {parameter.name: torch_dtype(parameter.dtype_in(model_dtype)) for parameter in layout.parameters}
    try:
        return {each.name: allocate(each.shape, dtypes[each.name], device) for each in layout.parameters}
    except (RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
        total = sum(math.prod(each.shape) * dtypes[each.name].itemsize for each in layout.parameters)
        raise ModelError(
            f"the weights take {total / 2**30:.1f} GiB in {model_dtype}, which {device} does not give: {error}. "
            "Free memory, or load in a narrower dtype."
        ) from error


def _device(device: str | torch.device) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f'device {device!r} is not one: give "cpu" or "cuda".') from error
    count = torch.cuda.device_count()
    if target.type == "cuda" and (target.index or 0) >= count:
        raise UsageError(f'device "{device}": torch sees {count} CUDA devices here. Give one of them, or "cpu".')
    return target
