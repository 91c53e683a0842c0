"""Which keys of a config have been read, through attributes, nested configs and nested dicts alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rtp_runtime.errors import ConfigError

Path = tuple[str, ...]

ALIASES: dict[str, tuple[str, ...]] = {
    "rope_parameters": ("rope_scaling",),
    "rope_scaling": ("rope_parameters",),
    "rope_type": ("type",),
    "dtype": ("torch_dtype",),
}
"""Names of today -> names in older files."""

FLAT_ROPE = ("rope_theta", "partial_rotary_factor")
"""Keys of `rope_parameters` that older files hold beside it."""

DERIVED = {
    "layer_types": ("use_sliding_window", "max_window_layers", "sliding_window_pattern", "full_attention_interval"),
    "sliding_window": ("use_sliding_window",),
}
"""Attributes that transformers derives, or overrides, from other keys -> those keys."""

KNOWN_BY_RUNTIME = ("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "auto_map")


class MissingKeyError(ConfigError, AttributeError):
    """A config lacks a key that somebody reads."""


class Reads:
    """The keys of one config.json, and those among them that were read."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._keys = dict(_leaves(raw, ()))
        self._aliases: dict[str, set[str]] = {new: set(old) for new, old in ALIASES.items()}
        self._read: set[Path] = set()
        for name in KNOWN_BY_RUNTIME:
            self.record((name,))

    def alias(self, name: str, other: str) -> None:
        """Reading `name` is reading `other` too."""
        self._aliases.setdefault(name, set()).add(other)

    def record(self, path: Path) -> None:
        """Remember that the key at `path`, and all that lies under it, was read, in every spelling."""
        *outer, name = path
        holders = [tuple(outer), *((*outer[:-1], other) for other in self._aliases.get(outer[-1] if outer else "", ()))]
        spellings = [name, *self._aliases.get(name, ())]
        self._read.update((*holder, spelling) for holder in holders for spelling in spellings)
        if name in FLAT_ROPE and outer and "rope_parameters" in outer:
            self._read.add((*outer[: outer.index("rope_parameters")], name))
        self._read.update((*outer, source) for source in DERIVED.get(name, ()))

    def holds(self, path: Path) -> bool:
        """Whether the file has anything at `path`."""
        return any(key[: len(path)] == path for key in self._keys)

    def unread(self) -> list[str]:
        """Dotted keys that were not read, in the file's order."""
        return [".".join(path) for path in self._keys if not self._was_read(path)]

    def values(self) -> dict[str, Any]:
        """Dotted key -> value of those that were read, in the file's order."""
        return {".".join(path): value for path, value in self._keys.items() if self._was_read(path)}

    def _was_read(self, path: Path) -> bool:
        return any(path[:length] in self._read for length in range(1, len(path) + 1))


class TrackedDict(dict[str, Any]):
    """A dict of a config that remembers what is read from it."""

    def __init__(self, values: Mapping[str, Any], path: Path, reads: Reads) -> None:
        super().__init__(values)
        self._path = path
        self._reads = reads

    def __getitem__(self, key: str) -> Any:
        return self._wrap(key, super().__getitem__(key))

    def __iter__(self) -> Iterator[str]:
        # Without an iterator of its own, dict(config.rope_parameters) would copy past __getitem__.
        return iter(super().keys())

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def items(self) -> Any:
        return {key: self[key] for key in self}.items()

    def values(self) -> Any:
        return {key: self[key] for key in self}.values()

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def _wrap(self, key: str, value: Any) -> Any:
        path = (*self._path, key)
        if isinstance(value, dict):
            return TrackedDict(value, path, self._reads)
        self._reads.record(path)
        return value


class ConfigView:
    """Keys of a JSON object as attributes, for model types that transformers does not know."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(name)
        return self._values[name]

    def to_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def get_text_config(self) -> ConfigView:
        """The language model's part, as transformers' configs give it."""
        text = self._values.get("text_config")
        return ConfigView(text) if isinstance(text, Mapping) else self


class TrackedConfig:
    """A nested config (`config.text_config`) whose reads are remembered."""

    def __init__(self, config: Any, path: Path, reads: Reads, origin: str) -> None:
        self._config = config
        self._path = path
        self._reads = reads
        self._origin = origin

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return tracked(self._config, name, self._path, self._reads, self._origin)


def tracked(config: Any, name: str, path: Path, reads: Reads, origin: str) -> Any:
    """Attribute `name` of `config`, wrapped so that what is read further in is remembered. Raises MissingKeyError."""
    for new, old in getattr(config, "attribute_map", {}).items():
        reads.alias(new, old)
        reads.alias(old, new)
    try:
        value = getattr(config, name)
    except AttributeError as error:
        key = ".".join((*path, name))
        raise MissingKeyError(f"{origin}: has no {key!r}, which the model needs. Add it with its value.") from error
    inner = (*path, name)
    if isinstance(value, dict):
        return TrackedDict(value, inner, reads)
    if hasattr(value, "model_type") and hasattr(value, "to_dict"):
        # Older files of wrappers hold the text model's keys at the top, and transformers makes the nested config.
        return TrackedConfig(value, inner if reads.holds(inner) else path, reads, origin)
    reads.record(inner)
    return value


def _leaves(part: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, Any]]:
    for name, value in part.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value
