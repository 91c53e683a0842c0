"""Ids to text while they arrive, without ever giving out part of a character.

A character may be spread over several tokens, and a decoder may drop the space that begins a text. So each piece is
the difference of two decodings of a short window of ids, and an unfinished character at its end is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rtp_runtime.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_WINDOW = 64
_MAX_CHARACTER_TOKENS = 4


class Detokenizer:
    """Decodes one continuation. The pieces joined are `tokenizer.decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._fresh = 0
        """Where in the window the ids begin that came after the last complete character."""
        self._emitted = 0
        """How many characters of the window's text were given out."""

    def add(self, ids: Sequence[int]) -> str:
        """Text that is certain now."""
        return "".join(self._add(token_id) for token_id in ids if token_id not in self._skipped)

    def flush(self) -> str:
        """What was held back, when no id follows: an unfinished character is U+FFFD."""
        text = self._tokenizer.decode(self._window)
        piece = text[self._emitted :]
        self._emitted = len(text)
        return piece

    def _add(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        certain = len(text.rstrip(_REPLACEMENT))
        if certain == len(text) and certain > self._emitted:
            piece = text[self._emitted :]
            self._restart(self._fresh)
            return piece
        if len(self._window) > _MAX_WINDOW:
            # Bytes that are no text: only the last of them can still become part of a character.
            held = 1 if certain < len(text) else 0
            piece = text[self._emitted : len(text) - held]
            self._restart(len(self._window) - _MAX_CHARACTER_TOKENS, held)
            return piece
        piece = text[self._emitted : certain]
        self._emitted = max(self._emitted, certain)
        return piece

    def _restart(self, start: int, held: int = 0) -> None:
        """Drop ids before `start`. Those kept are context: a decoder treats the first of a text differently."""
        self._window = self._window[start:]
        self._fresh = len(self._window)
        self._emitted = len(self._tokenizer.decode(self._window)) - held
