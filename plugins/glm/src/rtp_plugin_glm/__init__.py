"""The GLM plugin: says which architectures it provides. Imports no torch; the models are imported when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rtp_runtime import hookimpl

if TYPE_CHECKING:
    from rtp_runtime.plugins import ModelRegistry

RTP_API = "0.1"


@hookimpl
def rtp_register_models(models: ModelRegistry) -> None:
    models.add("GlmForCausalLM", "rtp_plugin_glm.glm")
    models.add("Glm4ForCausalLM", "rtp_plugin_glm.glm4")
    models.add("Glm4MoeForCausalLM", "rtp_plugin_glm.glm4_moe")
    models.add("Glm4MoeLiteForCausalLM", "rtp_plugin_glm.glm4_moe_lite")
    models.add("GlmMoeDsaForCausalLM", "rtp_plugin_glm.glm_moe_dsa")
    models.add("Glm5NextForConditionalGeneration", "rtp_plugin_glm.glm5_next")
