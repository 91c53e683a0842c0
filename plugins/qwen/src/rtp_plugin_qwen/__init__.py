"""The Qwen plugin: says which architectures it provides. Imports no torch; the models are imported when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rtp_runtime import hookimpl

if TYPE_CHECKING:
    from rtp_runtime.plugins import ModelRegistry

RTP_API = "0.1"


@hookimpl
def rtp_register_models(models: ModelRegistry) -> None:
    models.add("Qwen2ForCausalLM", "rtp_plugin_qwen.qwen2")
    models.add("Qwen3ForCausalLM", "rtp_plugin_qwen.qwen3")
    models.add("Qwen2MoeForCausalLM", "rtp_plugin_qwen.qwen2_moe")
    models.add("Qwen3MoeForCausalLM", "rtp_plugin_qwen.qwen3_moe")
    models.add("Qwen3NextForCausalLM", "rtp_plugin_qwen.qwen3_next")
    models.add("Qwen3_5ForCausalLM", "rtp_plugin_qwen.qwen3_5")
    models.add("Qwen3_5ForConditionalGeneration", "rtp_plugin_qwen.qwen3_5")
    models.add("Qwen3_5MoeForCausalLM", "rtp_plugin_qwen.qwen3_5_moe")
    models.add("Qwen3_5MoeForConditionalGeneration", "rtp_plugin_qwen.qwen3_5_moe")
    models.add("Qwen2_5_VLForConditionalGeneration", "rtp_plugin_qwen.qwen2_5_vl")
    models.add("Qwen3VLForConditionalGeneration", "rtp_plugin_qwen.qwen3_vl")
    models.add("Qwen4ExpForCausalLM", "rtp_plugin_qwen.qwen4_exp")
    models.add("Qwen4ExpForConditionalGeneration", "rtp_plugin_qwen.qwen4_exp")
