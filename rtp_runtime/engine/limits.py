"""What a loaded model allows: vocabulary, context, and the ids that end a text. Read once, when an engine is made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtp_runtime.errors import ConfigError
from rtp_runtime.model.config import stated_context


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """A model's vocabulary size, its context (None: it has no limit of its own) and its end-of-sequence ids."""

    vocab_size: int
    context: int | None
    eos_ids: frozenset[int]


def model_limits(config: Any, path: str | Path | None, tokenizer_eos: Iterable[int] = ()) -> ModelLimits:
    """Limits from a `ModelConfig`, its checkpoint's generation config and its tokenizer.

    End-of-sequence ids are the union of what all three say, since checkpoints often name the end of a turn in one only.

    Raises:
        ConfigError: no vocabulary size.
    """
    vocab_size = _read(config, "vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ConfigError(f"config.json gives vocab_size={vocab_size!r}: give the number of rows of the output head")
    eos = set(tokenizer_eos) | _ids(_read(config, "eos_token_id")) | _ids(config.raw.get("eos_token_id"))
    if path is not None:
        eos |= _ids(_generation_config(Path(path)).get("eos_token_id"))
    return ModelLimits(
        vocab_size=vocab_size,
        context=stated_context(lambda key: _read(config, key)),
        eos_ids=frozenset(id_ for id_ in eos if 0 <= id_ < vocab_size),
    )


def _read(config: Any, key: str) -> Any:
    """A key of config.json, in the text part of a wrapper or at the top; else transformers' default for it."""
    raw = config.raw
    for part in (raw.get("text_config"), raw):
        if isinstance(part, Mapping) and part.get(key) is not None:
            return part[key]
    hf: Any = config.hf
    text = hf.get_text_config() if hasattr(hf, "get_text_config") else hf
    return getattr(text, key, None)


def _generation_config(path: Path) -> dict[str, Any]:
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}): repair or remove it") from error
    return content if isinstance(content, dict) else {}


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {each for each in values if isinstance(each, int) and not isinstance(each, bool)}
