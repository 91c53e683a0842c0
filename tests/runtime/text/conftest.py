"""Tiny tokenizers, saved as a checkpoint has them: byte-level BPE, and BPE with byte fallback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 3:45, isn't it?",
    "Größe, naïve café; Ελληνικά; 你好，世界; emoji 👩‍👩‍👧 🏳️‍🌈",
    "def f(x):\n    return {'a': [1, 2.5, None]}\n\n\t# done",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

Saver = Callable[..., Path]


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    words = ["▁", "T", "h", "e", "▁The", "o", "x", "▁fox", "▁ju", "mps", "l", "▁h", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture
def save(tmp_path: Path) -> Saver:
    """Writes a tokenizer and the files beside it into an empty directory."""

    def saver(tokenizer: Tokenizer, config: dict[str, Any] | None = None, **files: Any) -> Path:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        for name, content in files.items():
            path = tmp_path / name.replace("__", ".")
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return tmp_path

    return saver
