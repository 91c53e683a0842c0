"""Writes a loaded model back as the checkpoint it came from."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from rtp_kernel.components import Component
from rtp_runtime.model.loading import LoadedModel
from rtp_runtime.weights.dtypes import dtype_name
from rtp_runtime.weights.export import ExportReport, export_weights


def export_model(loaded: LoadedModel, directory: str | Path) -> ExportReport:
    """Export all weights into `directory`; see `rtp_runtime.weights.export`. Raises UsageError."""
    return export_weights(
        lambda name: logical_tensor(loaded.module, name), loaded.weights, dtype_name(loaded.dtype), directory
    )


def logical_tensor(module: nn.Module, name: str) -> Tensor:
    """The parameter or buffer `name` as it was loaded, also where preparing has freed it."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    found = owner.logical(leaf) if isinstance(owner, Component) else getattr(owner, leaf)
    assert isinstance(found, Tensor), name
    return found.detach()
