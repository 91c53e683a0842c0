"""Turns names that a checkpoint chose into names that may become files, modules and classes, or refuses them."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass

from rtp_runtime.errors import ConfigError

_MODEL_TYPE = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_CLASS = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_MAX_LENGTH = 64


@dataclass(frozen=True, slots=True)
class PluginNames:
    """Every name that a scaffold derives from the config."""

    model_type: str
    architecture: str

    @property
    def module(self) -> str:
        return self.model_type.replace("-", "_")

    @property
    def short(self) -> str:
        return self.model_type.replace("_", "-")

    @property
    def distribution(self) -> str:
        return f"rtp-plugin-{self.short}"

    @property
    def package(self) -> str:
        return f"rtp_plugin_{self.module}"


def plugin_names(model_type: object, architecture: object) -> PluginNames:
    """The names of the plugin for a config.

    Raises:
        ConfigError: a value that is no plain identifier; it would become a folder or Python code.
    """
    if not isinstance(model_type, str) or len(model_type) > _MAX_LENGTH or not _MODEL_TYPE.fullmatch(model_type):
        raise ConfigError(
            f"model_type {model_type!r} cannot name a plugin: it must be at most {_MAX_LENGTH} lower-case letters, "
            "digits and single underscores or dashes, starting with a letter. Correct it in config.json."
        )
    if keyword.iskeyword(model_type):
        raise ConfigError(
            f"model_type {model_type!r} is a Python keyword and cannot name a module. Correct it in config.json."
        )
    if not isinstance(architecture, str) or len(architecture) > _MAX_LENGTH or not _CLASS.fullmatch(architecture):
        raise ConfigError(
            f"architecture {architecture!r} is no class name: it must be at most {_MAX_LENGTH} letters, digits and "
            "underscores. Correct `architectures` in config.json."
        )
    return PluginNames(model_type, architecture)
