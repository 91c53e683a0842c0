"""Tokenizers that are not a tokenizer.json (sentencepiece models, vocab and merges), read by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rtp_runtime.errors import CheckpointError
from rtp_runtime.text.files import NAMED_TOKENS


class TransformersBackend:
    """A transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(map(int, tokenizer.all_special_ids))
        self.vocab_size = len(tokenizer)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.get_vocab().get(token)
        return token_id


def load_with_transformers(directory: Path) -> tuple[TransformersBackend, dict[str, str]]:
    """The tokenizer in a directory, and its named tokens. Code that a checkpoint ships is not run.

    Raises CheckpointError.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a format's reader raises
        raise CheckpointError(
            f"the tokenizer files in {directory} cannot be read: {error}. "
            "Fetch them again, or ask for the checkpoint's tokenizer.json."
        ) from error
    named = tokenizer.special_tokens_map
    return TransformersBackend(tokenizer), {name: str(named[name]) for name in NAMED_TOKENS if name in named}
