"""The MiniMax plugin: says which architectures it provides. Imports no torch; models are imported when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rtp_runtime import hookimpl

if TYPE_CHECKING:
    from rtp_runtime.plugins import ModelRegistry

RTP_API = "0.1"


@hookimpl
def rtp_register_models(models: ModelRegistry) -> None:
    models.add("MiniMaxForCausalLM", "rtp_plugin_minimax.minimax")
    models.add("MiniMaxM2ForCausalLM", "rtp_plugin_minimax.minimax_m2")
    models.add("MiniMaxM3VLForCausalLM", "rtp_plugin_minimax.minimax_m3_vl")
    models.add("MiniMaxM3SparseForConditionalGeneration", "rtp_plugin_minimax.minimax_m3_vl")
