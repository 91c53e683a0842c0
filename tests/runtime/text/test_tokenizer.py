"""Encoding, decoding, special tokens and stop ids equal transformers' AutoTokenizer on the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from rtp_runtime.errors import CheckpointError, ConfigError
from rtp_runtime.text import Tokenizer, load_tokenizer
from rtp_runtime.text.tokenizer import JsonBackend

Saver = Callable[..., Path]
TEXTS = [
    "The quick brown fox",
    "  two  spaces\n\n\tand a tab ",
    "Größe 你好 👩‍👩‍👧 \u200d\ufeff",
    "<|im_start|>user\nhi<|im_end|>\n<tool_call>{}",
    "",
]


def loaded(directory: Path) -> Tokenizer:
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


def reference(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory))


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_ids_and_text_equal_those_of_transformers(family: str, save: Saver, request: pytest.FixtureRequest) -> None:
    directory = save(request.getfixturevalue(family), {"eos_token": "<|im_end|>" if family == "byte_level" else "</s>"})
    ours, theirs = loaded(directory), reference(directory)
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == set(theirs.all_special_ids) | {
        index for index, token in theirs.added_tokens_decoder.items() if token.special
    }
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_truncation_and_padding_in_the_file_do_not_touch_prompts(byte_level: Backend, save: Saver) -> None:
    tokenizer = Backend.from_str(byte_level.to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    ids = loaded(save(tokenizer)).encode(TEXTS[0])
    assert ids == byte_level.encode(TEXTS[0]).ids
    assert len(ids) > 4


def test_tokens_declared_only_in_the_config_match_whole(byte_level: Backend, save: Saver) -> None:
    size = byte_level.get_vocab_size()
    entry = {
        "content": "<think>",
        "special": False,
        "normalized": False,
        "lstrip": False,
        "rstrip": False,
        "single_word": False,
    }
    word = max((token for token in byte_level.get_vocab() if token.isascii() and token.isalpha()), key=len)
    directory = save(byte_level, {"added_tokens_decoder": {str(size): entry}, "eos_token": word})
    ours, theirs = loaded(directory), reference(directory)
    text = f"a <think>{word}</think> b"
    assert {size, byte_level.token_to_id(word)} <= set(ours.encode(text))
    assert ours.encode(text) == theirs.encode(text)


def test_stop_ids_are_the_union_in_order(byte_level: Backend, save: Saver) -> None:
    end, im_end = byte_level.token_to_id("<|endoftext|>"), byte_level.token_to_id("<|im_end|>")
    directory = save(
        byte_level,
        {"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}},
        generation_config__json={"eos_token_id": [end, 7]},
        config__json={"eos_token_id": 7, "text_config": {"eos_token_id": 9}},
    )
    assert loaded(directory).eos_ids == (end, 7, 9, im_end)


@pytest.mark.parametrize("value", ["3", -1, [1, None], True, 2.0])
def test_a_stop_id_that_is_none_is_refused(value: Any, byte_level: Backend, save: Saver) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is .* must be a token id"):
        load_tokenizer(save(byte_level, generation_config__json={"eos_token_id": value}))


def test_special_tokens_map_of_older_checkpoints(byte_level: Backend, save: Saver) -> None:
    directory = save(
        byte_level,
        {"pad_token": "<|endoftext|>"},
        special_tokens_map__json={"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"},
    )
    ours = loaded(directory)
    assert ours.special_tokens == dict(reference(directory).special_tokens_map)
    assert ours.eos_ids == (byte_level.token_to_id("<|im_end|>"),)


def test_no_tokenizer_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


def test_vocab_and_merges_are_read_by_transformers(byte_level: Backend, tmp_path: Path) -> None:
    model = json.loads(byte_level.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"})
    )
    ours, theirs = loaded(tmp_path), reference(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert theirs.eos_token_id in ours.eos_ids


def test_damaged_files_are_refused_by_name(byte_level: Backend, save: Saver) -> None:
    directory = save(byte_level)
    (directory / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json holds a list"):
        load_tokenizer(directory)
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json cannot be read as JSON"):
        load_tokenizer(directory)
    (directory / "tokenizer_config.json").unlink()
    (directory / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        load_tokenizer(directory)


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_byte_level_text_comes_back(byte_level: Backend, text: str) -> None:
    tokenizer = Tokenizer(JsonBackend(byte_level), special_tokens={}, templates={})
    assert tokenizer.decode(tokenizer.encode(text)) == text
