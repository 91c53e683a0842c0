"""Content keys: the chain in numbers of its own, and what makes two prefixes differ."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rtp_runtime.state.keys import ContentKeys, namespace


def digests(ids: list[int], first: bytes = b"", unit: int = 4, extra: dict[int, bytes] | None = None) -> list[bytes]:
    keys = ContentKeys(first, unit)
    keys.extend(np.array(ids, np.int64), extra or {})
    return keys.digests


def test_the_chain_is_sha256_over_little_endian_units() -> None:
    first = hashlib.sha256(b"start" + struct.pack("<4q", 1, 2, 3, 2**40)).digest()
    second = hashlib.sha256(first + struct.pack("<4q", 5, 6, 7, 8) + b"image").digest()
    assert digests([1, 2, 3, 2**40, 5, 6, 7, 8, 9], b"start", extra={1: b"image"}) == [first, second]
    assert digests([1, 2, 3]) == []


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(1, 7), max_size=8))
def test_growing_by_pieces_gives_the_same_keys(ids: list[int], pieces: list[int]) -> None:
    keys = ContentKeys(b"n", 3)
    end = 0
    for piece in [*pieces, len(ids)]:
        end = min(end + piece, len(ids))
        keys.extend(np.array(ids[keys.num_tokens : end], np.int64))
    assert keys.digests == digests(ids, b"n", 3)


@given(st.lists(st.integers(0, 1), min_size=8, max_size=8), st.lists(st.integers(0, 1), min_size=8, max_size=8))
def test_keys_agree_as_far_as_all_tokens_before_do(a: list[int], b: list[int]) -> None:
    for unit, (one, other) in enumerate(zip(digests(a, unit=2), digests(b, unit=2), strict=True)):
        assert (one == other) == (a[: 2 * unit + 2] == b[: 2 * unit + 2])


def test_parts_of_a_namespace_do_not_run_together() -> None:
    spaces = [
        ("a", "b"),
        ("ab", ""),
        ("a", None, "b"),
        ("a", "None", "b"),
        (1, 2),
        ("1", "2"),
        (12,),
        (True,),
        (1,),
        (),
    ]
    assert len({namespace(*parts) for parts in spaces}) == len(spaces)
    assert namespace("a", 1) == namespace("a", 1)
