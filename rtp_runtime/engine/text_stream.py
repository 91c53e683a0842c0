"""A request's text as it becomes certain: incremental decoding, and stop strings wherever token boundaries fall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class IncrementalDecoder(Protocol):
    """Turns ids into text, never emitting half a character."""

    def add(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class StopStrings:
    """Finds the first of several strings in a text that arrives in pieces, and holds back what may be its beginning."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = tuple(stops)
        self._keep = keep
        self._held = ""

    def add(self, piece: str) -> tuple[str, str | None]:
        """Text that is now certain, and the stop string that `piece` completed.

        The occurrence that ends first wins, then the longest, so that how the text was cut into pieces does not matter.
        """
        if not self._stops:
            return piece, None
        text = self._held + piece
        stop = self._first(text)
        if stop is not None:
            at = text.index(stop)
            self._held = ""
            return text[: at + len(stop) * self._keep], stop
        held = self._undecided(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None

    def flush(self) -> str:
        """What was held back, once nothing more comes."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> str | None:
        ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        return min(ends)[2] if ends else None

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextStream:
    """Decodes a request's tokens and watches for its stop strings."""

    def __init__(self, decoder: IncrementalDecoder, stops: Sequence[str], *, keep_stop: bool = False) -> None:
        self._decoder = decoder
        self._stops = StopStrings(stops, keep=keep_stop)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All that was emitted."""
        return "".join(self._pieces)

    def add(self, token_id: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Text that is now certain, and the stop string that the token completed.

        With `may_stop` false (before `min_tokens`) the text up to and with this token is no part of a stop string.
        """
        piece = self._decoder.add([token_id])
        if not may_stop:
            return self._emit(piece), None
        text, stop = self._stops.add(piece)
        return self._emit(text), stop

    def finish(self) -> tuple[str, str | None]:
        """The rest, when no token follows; an unfinished character may still complete a stop string."""
        text, stop = self._stops.add(self._decoder.flush())
        if stop is None:
            text += self._stops.flush()
        return self._emit(text), stop

    def _emit(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text
