"""A checkpoint's config: transformers' class where it knows the model type, the raw JSON beside it, and who read what.

No code of a checkpoint is executed unless `trust_remote_code` says so.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rtp_runtime.errors import ConfigError
from rtp_runtime.model.tracking import ConfigView, Reads, tracked

CONFIG_FILE = "config.json"
CONTEXT_KEYS = ("max_position_embeddings", "max_seq_len")
"""Where configs say how many tokens a request may have."""


class ModelConfig:
    """What a model reads its numbers from: attributes as in transformers' config, each read remembered.

    An attribute that the config lacks raises a `ConfigError` that is an `AttributeError` too, so that `getattr` with a
    default and `hasattr` work as usual.
    """

    def __init__(self, raw: Mapping[str, Any], path: Path | None = None, *, trust_remote_code: bool = False) -> None:
        self.raw = dict(raw)
        self.path = path
        self.architecture = _architecture(self.raw, path)
        self.model_type = str(raw.get("model_type", ""))
        self.reads = Reads(self.raw)
        self._trust = trust_remote_code
        self._hf: Any = None

    @property
    def hf(self) -> Any:
        """transformers' config object; a read-only view of the JSON when transformers does not know the model type."""
        if self._hf is None:
            self._hf = _hf_config(self.raw, self.path, self._trust)
        return self._hf

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "hf":
            raise AttributeError(name)
        return tracked(self.hf, name, (), self.reads, str(self.path or "the config"))

    def unread_keys(self) -> list[str]:
        """Keys of config.json, dotted, that nobody has read so far."""
        return self.reads.unread()

    def read_values(self) -> dict[str, Any]:
        """The keys of config.json, dotted, that were read, with their values."""
        return self.reads.values()

    def declared_dtype(self) -> str | None:
        """The dtype that the config names, at its top or in the text model's part."""
        for part in (self.raw, self.raw.get("text_config")):
            if isinstance(part, Mapping):
                for key in ("dtype", "torch_dtype"):
                    if isinstance(part.get(key), str):
                        return str(part[key]).removeprefix("torch.")
        return None

    def tie_flags(self) -> dict[str, bool]:
        """Every place of config.json that says whether the output head is tied to the embedding."""
        return dict(_find_flags(self.raw, "tie_word_embeddings", ""))


def load_config(path: str | Path, *, trust_remote_code: bool = False) -> ModelConfig:
    """The config in a checkpoint directory, or in a file.

    Raises ConfigError when it is missing, is not a JSON object, or names no architecture.
    """
    path = Path(path)
    file = path / CONFIG_FILE if path.is_dir() else path
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file}: is not a file.")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"), object_hook=_decoded)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{file}: not found. A checkpoint is a directory with config.json and .safetensors."
        ) from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON ({error}).") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: holds a {type(raw).__name__}, not a JSON object.")
    return ModelConfig(raw, file, trust_remote_code=trust_remote_code)


def _decoded(value: dict[str, Any]) -> Any:
    """{"__float__": "Infinity"} as the number: so transformers writes what JSON cannot (a limit of a time step)."""
    known = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
    return known.get(str(value["__float__"]), value) if value.keys() == {"__float__"} else value


class TextConfig:
    """The language model's part of a wrapper's config, with the wrapper's word on whether the head is tied."""

    def __init__(self, wrapper: Any, text: Any) -> None:
        self._wrapper = wrapper
        self._text = text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name == "tie_word_embeddings":
            return self._tied()
        return getattr(self._text, name)

    def _tied(self) -> bool:
        tied: bool = self._wrapper.tie_word_embeddings
        own: bool = getattr(self._text, "tie_word_embeddings", tied)
        said = self._wrapper.tie_flags() if hasattr(self._wrapper, "tie_flags") else {"tie_word_embeddings": tied}
        return tied if "tie_word_embeddings" in said else own


def text_config(config: Any) -> Any:
    """What a language model reads its numbers from: the `text_config` of a wrapper (vision-language), or `config`.

    Whether the output head is tied is the wrapper's decision; where its file says nothing, the text part's.
    """
    text = getattr(config, "text_config", None)
    return config if text is None else TextConfig(config, text)


def stated_context(read: Callable[[str], Any]) -> int | None:
    """How many tokens a request may have, by the first of `CONTEXT_KEYS` that says so; None where none does.

    `read` gives a key's value, or None.
    """
    values = (read(key) for key in CONTEXT_KEYS)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _architecture(raw: Mapping[str, Any], path: Path | None) -> str:
    names = raw.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str) and names[0].isidentifier():
        return names[0]
    said = f"architectures = {names!r}" if "architectures" in raw else "no architectures"
    words = str(raw.get("model_type", "my_model")).replace("-", "_").split("_")
    guess = "".join(word.capitalize() for word in words) + "ForCausalLM"
    raise ConfigError(
        f"{path or 'the config'}: has {said}, so nothing says which model this is. Add the name of its class in "
        f'transformers, for instance "architectures": ["{guess}"].'
    )


def _hf_config(raw: Mapping[str, Any], path: Path | None, trust_remote_code: bool) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    model_type = raw.get("model_type")
    try:
        if model_type in CONFIG_MAPPING_NAMES:
            return CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(raw)))
        if trust_remote_code and "auto_map" in raw and path is not None:
            from transformers import AutoConfig

            return AutoConfig.from_pretrained(path.parent, trust_remote_code=True)
    except Exception as error:  # whatever transformers' validation raises is about this config
        raise ConfigError(f"{path or 'the config'}: transformers cannot read it: {error}") from error
    return ConfigView(raw)


def _find_flags(part: Mapping[str, Any], key: str, prefix: str) -> Iterator[tuple[str, bool]]:
    for name, value in part.items():
        if name == key and isinstance(value, bool):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _find_flags(value, key, f"{prefix}{name}.")
