"""Streamed pieces join to what decoding everything at once gives, and never hold part of a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from rtp_runtime.text import Detokenizer, Tokenizer
from rtp_runtime.text.tokenizer import JsonBackend

TEXT = "Größe: 你好, 漢字 👩‍👩‍👧🦊! naïve  café\n"


def wrap(backend: Backend) -> Tokenizer:
    return Tokenizer(JsonBackend(backend), special_tokens={}, templates={})


def pieces(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> list[str]:
    stream = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(stream.add([token_id]) for token_id in ids), stream.flush()]


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_characters_of_several_tokens_come_out_whole(family: str, request: pytest.FixtureRequest) -> None:
    tokenizer = wrap(request.getfixturevalue(family))
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert any("\ufffd" in tokenizer.decode(ids[:end]) for end in range(len(ids))), "characters of several tokens"
    got = pieces(tokenizer, ids)
    assert "".join(got) == TEXT
    assert not any("\ufffd" in piece for piece in got)
    assert len([piece for piece in got if piece]) > 10, "text is given out as it becomes certain"


def test_an_unfinished_character_is_held_until_the_end(byte_level: Backend) -> None:
    tokenizer = wrap(byte_level)
    ids = tokenizer.encode("a👧")[:-1]
    got = pieces(tokenizer, ids)
    assert got == ["a", *[""] * (len(ids) - 1), "\ufffd"]


def test_special_tokens_are_skipped_or_kept(byte_level: Backend) -> None:
    tokenizer = wrap(byte_level)
    ids = tokenizer.encode("<|im_start|>fox<|im_end|> dog")
    assert "".join(pieces(tokenizer, ids)) == "fox dog"
    assert "".join(pieces(tokenizer, ids, skip=False)) == "<|im_start|>fox<|im_end|> dog"


def test_a_space_after_a_skipped_token_is_kept(byte_fallback: Backend) -> None:
    tokenizer = wrap(byte_fallback)
    space_fox = byte_fallback.token_to_id("▁fox")
    ids = [space_fox, 2, space_fox, 1, 2, space_fox]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True) == "fox fox fox"


def test_several_ids_at_once_give_the_same_text(byte_level: Backend) -> None:
    tokenizer = wrap(byte_level)
    ids = tokenizer.encode(TEXT)
    stream = Detokenizer(tokenizer)
    assert stream.add(ids[:7]) + stream.add(ids[7:]) + stream.flush() == TEXT


def test_ids_outside_the_vocabulary_are_nothing(byte_level: Backend) -> None:
    tokenizer = wrap(byte_level)
    ids = tokenizer.encode("fox")
    assert "".join(pieces(tokenizer, [*ids, 100_000, *ids])) == "foxfox"


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 332), max_size=40))
def test_any_ids_of_a_byte_level_vocabulary(byte_level: Backend, ids: list[int]) -> None:
    tokenizer = wrap(byte_level)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(data=st.lists(st.sampled_from([0xFF, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F]), min_size=60, max_size=300))
def test_long_runs_of_bytes_that_are_no_text(byte_level: Backend, data: list[int]) -> None:
    alphabet = byte_alphabet()
    ids = [byte_level.token_to_id(alphabet[byte]) for byte in data]
    assert "".join(pieces(wrap(byte_level), ids)) == bytes(data).decode("utf-8", errors="replace")


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_through_byte_fallback(byte_fallback: Backend, text: str) -> None:
    tokenizer = wrap(byte_fallback)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = dict(zip(printable, map(chr, printable), strict=True))
    rest = [byte for byte in range(256) if byte not in stand_ins]
    return stand_ins | {byte: chr(256 + index) for index, byte in enumerate(rest)}
