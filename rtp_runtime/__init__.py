"""The runtime: requests, checkpoints, state and plugins, and no model. The public names, imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rtp_runtime.async_llm import AsyncLLM
    from rtp_runtime.engine.config import EngineConfig
    from rtp_runtime.engine.outputs import RequestOutput
    from rtp_runtime.engine.sampling_params import SamplingParams
    from rtp_runtime.errors import RtpError
    from rtp_runtime.hookspecs import hookimpl
    from rtp_runtime.llm import LLM

__version__ = "0.1.0"

_HOMES = {
    "LLM": "rtp_runtime.llm",
    "AsyncLLM": "rtp_runtime.async_llm",
    "EngineConfig": "rtp_runtime.engine.config",
    "RequestOutput": "rtp_runtime.engine.outputs",
    "SamplingParams": "rtp_runtime.engine.sampling_params",
    "RtpError": "rtp_runtime.errors",
    "hookimpl": "rtp_runtime.hookspecs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "EngineConfig",
    "RequestOutput",
    "RtpError",
    "SamplingParams",
    "__version__",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module, so that `import rtp_runtime` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
