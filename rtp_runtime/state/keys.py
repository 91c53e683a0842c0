"""Content keys: what names the state after a prefix, so that equal prefixes find each other and others never do.

A key is a SHA-256 over all that decides the state: a namespace, then the tokens in units, each chained to the one
before it. Tokens are hashed as 64-bit little-endian integers, so that keys are the same on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

NOTHING: Final[Mapping[int, bytes]] = MappingProxyType({})


def namespace(*parts: str | int | float | bool | None) -> bytes:
    """Key of the empty prefix: a SHA-256 over parts of which none can pass for another or for two.

    The parts are whatever decides the computation besides the tokens (weights, config, dtypes, adapter) and a salt.
    """
    digest = hashlib.sha256()
    for part in parts:
        text = repr(part).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()


class ContentKeys:
    """The keys of one request: `digests[i]` names the state after `(i + 1) * unit` tokens."""

    __slots__ = ("_first", "digests", "unit")

    def __init__(self, first: bytes, unit: int) -> None:
        """`first` is the namespace, `unit` the tokens of one link of the chain."""
        self._first = first
        self.unit = unit
        self.digests: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Tokens that have keys."""
        return len(self.digests) * self.unit

    def extend(self, token_ids: NDArray[Any], extra: Mapping[int, bytes] = NOTHING) -> None:
        """Chain the tokens that follow `num_tokens`; those after the last full unit are left out.

        `extra` is content that ids do not tell, by unit of the request: hashes of media whose places lie there.
        """
        ids = np.ascontiguousarray(token_ids, dtype="<i8")
        last = self.digests[-1] if self.digests else self._first
        for start in range(0, len(ids) - self.unit + 1, self.unit):
            # Both parts before `extra` have a fixed length, so that it cannot pass for one of them.
            content = last + ids[start : start + self.unit].tobytes() + extra.get(len(self.digests), b"")
            last = hashlib.sha256(content).digest()
            self.digests.append(last)
