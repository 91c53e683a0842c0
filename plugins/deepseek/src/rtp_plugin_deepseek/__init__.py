"""The DeepSeek plugin: says which architectures it provides. Imports no torch; models are imported when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rtp_runtime import hookimpl

if TYPE_CHECKING:
    from rtp_runtime.plugins import ModelRegistry

RTP_API = "0.1"


@hookimpl
def rtp_register_models(models: ModelRegistry) -> None:
    models.add("DeepseekV2ForCausalLM", "rtp_plugin_deepseek.deepseek_v2")
    models.add("DeepseekV3ForCausalLM", "rtp_plugin_deepseek.deepseek_v3")
    models.add("DeepseekV32ForCausalLM", "rtp_plugin_deepseek.deepseek_v32")
    models.add("DeepseekV4ForCausalLM", "rtp_plugin_deepseek.deepseek_v4")
