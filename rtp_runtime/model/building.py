"""A definition's module, built on the meta device, and held against what its weight descriptors say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rtp_kernel.batch import Build
from rtp_kernel.components import bind_components
from rtp_kernel.registry import OpSelectionError, OpTable, default_registry
from rtp_runtime.errors import KernelError, PluginError
from rtp_runtime.model.assessment import call_plugin
from rtp_runtime.model.registry import ModelDefinition, ModelImplementation
from rtp_runtime.plugins import Plugins
from rtp_runtime.state import StateDescriptors
from rtp_runtime.state.grouping import group_states
from rtp_runtime.weights.dtypes import dtype_name
from rtp_runtime.weights.resolve import ResolvedLayout


def build_module(
    definition: ModelDefinition, implementation: ModelImplementation, config: Any, dtype: torch.dtype
) -> nn.Module:
    """The module on the meta device, its unpinned parameters in `dtype`. Raises PluginError or ConfigError."""
    with _default_dtype(dtype), torch.device("meta"):
        module = call_plugin(definition, "building", implementation.model_class, config, Build(dtype=dtype))
    if not isinstance(module, nn.Module):
        raise PluginError(f"{definition.target.origin}: {definition.architecture} is not a torch.nn.Module.")
    return module


def make_op_table(
    plugins: Plugins, device: str, dtype: torch.dtype, *, deterministic: bool = False, block_size: int = 0
) -> OpTable:
    """Every installed implementation of every op, for one device and dtype; `block_size` as `OpContext` has it."""
    registry = default_registry()
    for extension in plugins.ops:
        registry.add(extension.subject, str(extension.target))
    return OpTable(registry, device=device, dtype=dtype, deterministic=deterministic, block_size=block_size)


def common_block_size(states: StateDescriptors, cache_dtype: str, block_size: int | None) -> int:
    """Tokens per block of all state groups, given what is asked for; 0 when they differ or there are none."""
    groups = group_states(states, cache_dtype=cache_dtype, block_size=block_size)
    sizes = {group.block_size for group in groups if not group.is_slot}
    return sizes.pop() if len(sizes) == 1 else 0


def bind_module(
    definition: ModelDefinition, module: nn.Module, ops: OpTable, device: torch.device, dtype: torch.dtype
) -> None:
    """Bind every component. Raises KernelError when nothing serves one of its ops."""
    try:
        with _default_dtype(dtype):
            call_plugin(definition, "binding", bind_components, module, ops, device, dtype)
    except PluginError as error:
        if isinstance(error.__cause__, OpSelectionError):
            raise KernelError(str(error.__cause__)) from error
        raise


def stored_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by every name they have: what a checkpoint must fill."""
    stored: dict[str, Tensor] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        dotted = f"{prefix}." if prefix else ""
        for name, parameter in child._parameters.items():
            if parameter is not None:
                stored[dotted + name] = parameter
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                stored[dotted + name] = buffer
    return stored


def check_described(definition: ModelDefinition, module: nn.Module, layout: ResolvedLayout, model_dtype: str) -> None:
    """Each parameter and persistent buffer is described exactly once, in its shape and dtype. Raises PluginError."""
    problems = list(_disagreements(module, layout, model_dtype))
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:8])
        more = f"\n  … and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise PluginError(
            f"{definition.target.origin}: the module of {definition.architecture} and its weight descriptors "
            f"(layout {layout.name!r}) disagree:\n{shown}{more}"
        )


def _disagreements(module: nn.Module, layout: ResolvedLayout, model_dtype: str) -> Iterator[str]:
    stored = stored_tensors(module)
    ties = {tie.parameter for tie in layout.ties}
    for name in stored:
        if name not in layout.by_name and name not in ties:
            yield f"{name} {list(stored[name].shape)} is in the module and has no descriptor"
    for name in (*layout.by_name, *ties):
        if name not in stored:
            yield f"{name} has a descriptor and is not in the module"
    for name, parameter in layout.by_name.items():
        if name not in stored:
            continue
        if tuple(stored[name].shape) != parameter.shape:
            yield f"{name} is {list(stored[name].shape)} in the module; its descriptor makes {list(parameter.shape)}"
        wanted = parameter.dtype_in(model_dtype)
        if dtype_name(stored[name].dtype) != wanted:
            yield f"{name} is {dtype_name(stored[name].dtype)} in the module; its descriptor says {wanted}"


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put `tensor` in the place of the parameter or buffer `name`."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


def check_made(definition: ModelDefinition, module: nn.Module) -> None:
    """Nothing is left on the meta device. Raises PluginError."""
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise PluginError(
                f"{definition.target.origin}: the buffer {name} of {definition.architecture} is neither in the "
                "checkpoint nor made by a component's bind(). Make it there, on the binding's device."
            )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
