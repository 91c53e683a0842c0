"""The runtime: requests, checkpoints, state and plugins, and no model. The public names, imported when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rtp_runtime.exports import lazy_names

if TYPE_CHECKING:
    from rtp_runtime.async_llm import AsyncLLM
    from rtp_runtime.engine.config import EngineConfig
    from rtp_runtime.engine.outputs import RequestOutput
    from rtp_runtime.engine.sampling_params import SamplingParams
    from rtp_runtime.errors import RtpError
    from rtp_runtime.hookspecs import hookimpl
    from rtp_runtime.llm import LLM

__version__ = "0.1.0"

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

__getattr__ = lazy_names(
    __name__,
    {
        "LLM": "llm",
        "AsyncLLM": "async_llm",
        "EngineConfig": "engine.config",
        "RequestOutput": "engine.outputs",
        "SamplingParams": "engine.sampling_params",
        "RtpError": "errors",
        "hookimpl": "hookspecs",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
