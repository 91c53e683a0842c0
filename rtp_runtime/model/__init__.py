"""Models: their configs, where their checkpoints lie, who provides them, and how one is loaded.

Importing this imports neither torch nor transformers; `loading` does, when a model is wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rtp_runtime.exports import lazy_names
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

__getattr__ = lazy_names(__name__, {"LoadedModel": "loading", "load_model": "loading"})
