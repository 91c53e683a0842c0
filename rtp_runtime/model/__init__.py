"""Models: their configs, where their checkpoints lie, who provides them, and how one is loaded.

Importing this imports neither torch nor transformers; `loading` does, when a model is wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rtp_runtime.model.checkpoint import resolve_checkpoint
from rtp_runtime.model.config import ModelConfig, load_config, text_config
from rtp_runtime.model.rope import rope_parameters

if TYPE_CHECKING:
    from rtp_runtime.model.loading import LoadedModel, load_model

__all__ = [
    "LoadedModel",
    "ModelConfig",
    "load_config",
    "load_model",
    "resolve_checkpoint",
    "rope_parameters",
    "text_config",
]


def __getattr__(name: str) -> Any:
    if name in ("LoadedModel", "load_model"):
        from rtp_runtime.model import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
