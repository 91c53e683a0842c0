"""Continuous batching in one process. Importing this package loads no torch; `engine.engine` does."""

from rtp_runtime.engine.config import EngineConfig
from rtp_runtime.engine.outputs import EngineStats, Logprob, RequestOutput, StepOutput
from rtp_runtime.engine.sampling_params import SamplingParams

__all__ = ["EngineConfig", "EngineStats", "Logprob", "RequestOutput", "SamplingParams", "StepOutput"]
