"""Edits of a config.json: values by their path inside the part that describes the language model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rtp_runtime.errors import NotJudgedError
from rtp_runtime.model.config import ModelConfig
from rtp_runtime.model.tracking import ConfigView

KeyPath = tuple[str, ...]
"""Keys from the text part of the config inwards."""
Edits = dict[KeyPath, Any]


def transformers_config(raw: Mapping[str, Any]) -> Any:
    """transformers' config object: of its model type, or of the class that its architecture takes.

    Raises:
        ConfigError: transformers cannot read it.
        NotJudgedError: transformers knows neither.
    """
    import transformers

    config = ModelConfig(raw)
    if not isinstance(config.hf, ConfigView):
        return config.hf
    known = getattr(getattr(transformers, config.architecture, None), "config_class", None)
    if known is None:
        raise NotJudgedError(
            f"transformers {transformers.__version__} knows neither model type {config.model_type!r} nor "
            f"{config.architecture}, so there is no reference to check against: install a version that does"
        )
    return known.from_dict(copy.deepcopy(dict(raw)))


@dataclass(frozen=True)
class TextPart:
    """A config.json and where its language model is described."""

    raw: Mapping[str, Any]
    prefix: KeyPath
    """Keys that lead to the text part."""
    values: Mapping[str, Any]
    """The text part as transformers understands it, with what it derives."""
    names: Mapping[str, str]
    """transformers' common names of keys -> this config's."""
    architecture: str

    @classmethod
    def of(cls, config: ModelConfig) -> TextPart:
        """The text part of a config that transformers knows."""
        whole = transformers_config(config.raw)
        text = whole.get_text_config()
        prefix: KeyPath = ()
        for key, value in config.raw.items():
            if isinstance(value, Mapping) and text is not whole and getattr(whole, key, None) is text:
                prefix = (key,)
        return cls(config.raw, prefix, text.to_dict(), dict(text.attribute_map), config.architecture)

    def key(self, name: str) -> KeyPath:
        """This config's key for what transformers calls `name`."""
        return (self.names.get(name, name),)

    @property
    def num_layers(self) -> int:
        return int(self.values[self.key("num_hidden_layers")[0]])

    def edited(self, edits: Edits) -> dict[str, Any]:
        """A copy of the config.json with these values."""
        raw = copy.deepcopy(dict(self.raw))
        for path, value in edits.items():
            part = raw
            for key in (*self.prefix, *path[:-1]):
                if not isinstance(part.get(key), dict):
                    part[key] = copy.deepcopy(self.get(path[:-1])) if key == path[0] else {}
                part = part[key]
            for key in self._spellings(path, part):
                part[key] = copy.deepcopy(value)
        return raw

    def _spellings(self, path: KeyPath, part: Mapping[str, Any]) -> list[str]:
        """The names under which a config.json may hold a value: transformers' common name may stand for its own."""
        key = path[-1]
        others = [alias for alias, own in self.names.items() if own == key and alias in part and len(path) == 1]
        return others if others and key not in part else [key, *others]

    def get(self, path: KeyPath) -> Any:
        """The value at a path, None where there is none."""
        value: Any = self.values
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def lists(self) -> Iterator[tuple[KeyPath, list[Any]]]:
        """All lists, but those of rotary embeddings and of quantisation: their lengths are not layers."""
        yield from _lists(self.values, ())

    def per_layer(self) -> list[str]:
        """Keys at the top of the text part whose lists have an entry for each layer."""
        total = self.num_layers
        return [path[0] for path, value in self.lists() if len(path) == 1 and len(value) == total]

    def integers(self) -> Iterator[tuple[KeyPath, int]]:
        """All whole numbers at the top of the text part."""
        for key, value in self.values.items():
            if isinstance(value, int) and not isinstance(value, bool) and not key.endswith("_token_id"):
                yield (key,), value


def _lists(part: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, list[Any]]]:
    for key, value in part.items():
        if not isinstance(key, str) or key.startswith(("rope", "quantization", "id2label", "architectures")):
            continue
        if isinstance(value, Mapping):
            yield from _lists(value, (*path, key))
        elif isinstance(value, list) and not key.endswith("_token_id"):
            yield (*path, key), value
