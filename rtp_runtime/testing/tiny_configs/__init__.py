"""The configs of the tiny checkpoints: small, and with every branch of their model in use."""

from __future__ import annotations

from typing import Final

from rtp_runtime.testing.tiny_configs.common import COMMON, VOCAB_SIZE, Tiny, rope
from rtp_runtime.testing.tiny_configs.deepseek import DEEPSEEK
from rtp_runtime.testing.tiny_configs.glm import GLM
from rtp_runtime.testing.tiny_configs.minimax import MINIMAX
from rtp_runtime.testing.tiny_configs.qwen import QWEN

__all__ = ["COMMON", "FAMILIES", "TINY", "VOCAB_SIZE", "Tiny", "rope"]

FAMILIES: Final[dict[str, dict[str, Tiny]]] = {"qwen": QWEN, "deepseek": DEEPSEEK, "glm": GLM, "minimax": MINIMAX}
"""By the plugin that serves them."""

TINY: Final[dict[str, Tiny]] = QWEN | DEEPSEEK | GLM | MINIMAX
