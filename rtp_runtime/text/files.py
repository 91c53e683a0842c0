"""Reading the small files beside a checkpoint's tokenizer: JSON objects, special tokens, stop ids, chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rtp_runtime.errors import ConfigError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty when there is no such file. Raises ConfigError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}. Fetch the file again.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not a JSON object. Fetch the file again.")
    return value


def named_tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """The tokens that have a name (bos_token, eos_token, …), as chat templates see them.

    `config` is tokenizer_config.json; special_tokens_map.json speaks only where that is of the older form.
    """
    legacy = {} if "added_tokens_decoder" in config else read_object(directory / "special_tokens_map.json")
    tokens = {name: _content(legacy.get(name, config.get(name))) for name in NAMED_TOKENS}
    return {name: token for name, token in tokens.items() if token is not None}


def _content(token: Any) -> str | None:
    """A token is written as a string, or as an object with its text in `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def stop_ids(directory: Path) -> list[int]:
    """Ids that end a text according to generation_config.json and config.json, in that order, each once.

    Raises ConfigError for an eos_token_id that is neither an id nor a list of ids.
    """
    config_path = directory / "config.json"
    config = read_object(config_path)
    text_config = config.get("text_config")
    generation_path = directory / "generation_config.json"
    ids = _ids(read_object(generation_path), generation_path) + _ids(config, config_path)
    if isinstance(text_config, dict):
        ids += _ids(text_config, config_path)
    return list(dict.fromkeys(ids))


def _ids(config: dict[str, Any], path: Path) -> list[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ConfigError(f"{path}: eos_token_id is {value!r}; it must be a token id or a list of them.")
    return list(ids)


def chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name; "default" is the one that is used. Files take precedence over tokenizer_config.json.

    Raises ConfigError for a template that is not text.
    """
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    single = directory / "chat_template.jinja"
    if single.is_file():
        files["default"] = single
    if files:
        return {name: _read_text(path) for name, path in files.items()}
    legacy = directory / "chat_template.json"
    value = config.get("chat_template", read_object(legacy).get("chat_template"))
    if isinstance(value, list):
        return {_string(each, "name", directory): _string(each, "template", directory) for each in value}
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{directory}: chat_template is a {type(value).__name__}; it must be a string.")
    return {} if value is None else {"default": value}


def _string(entry: Any, key: str, directory: Path) -> str:
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, str):
        raise ConfigError(f"{directory}: an entry of the list chat_template has no text under {key!r}: {entry!r:.80}")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}. Fetch the file again.") from error
