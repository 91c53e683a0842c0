"""Text to ids and back: tokenizer, chat template, incremental detokenizer. Nothing of a checkpoint is executed."""

from __future__ import annotations

from rtp_runtime.text.chat import ChatTemplate
from rtp_runtime.text.detokenizer import Detokenizer
from rtp_runtime.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "Tokenizer", "load_tokenizer"]
