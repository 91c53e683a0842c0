"""`"package.module:name"` strings: found without importing anything, imported when they are used.

Registering a plugin must not import torch, so registries keep strings, each with the plugin that gave it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.machinery
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

from rtp_runtime.errors import PluginError


@dataclass(frozen=True, slots=True)
class Origin:
    """Who registered something: the plugin's name, and its distribution and version where it has metadata."""

    plugin: str
    distribution: str | None = None
    version: str | None = None

    def __str__(self) -> str:
        if self.distribution is None:
            return f"plugin {self.plugin!r}"
        return f"plugin {self.plugin!r} ({self.distribution} {self.version})"


@dataclass(frozen=True, slots=True)
class LazyTarget:
    """A module, or a name in a module, that `origin` promises to exist."""

    module: str
    name: str | None
    origin: Origin

    @classmethod
    def parse(cls, target: object, origin: Origin, *, named: bool | None = None) -> LazyTarget:
        """Check a string and that its module can be found; nothing is imported.

        `named` says whether `:name` must be there (True), must not (False), or may (None). Raises PluginError.
        """
        shapes = {True: '"package.module:name"', False: '"package.module"', None: '"package.module[:name]"'}
        module, colon, name = target.partition(":") if isinstance(target, str) else ("", "", "")
        parts = [*module.split("."), *([name] if colon else [])]
        if not all(part.isidentifier() for part in parts) or (named is not None and named != bool(colon)):
            raise PluginError(f"{target!r} is not of the form {shapes[named]}. Registries take strings, not objects.")
        if find_module(module) is None:
            raise PluginError(f"the module of {target!r} cannot be found. Correct the string or ship the module.")
        return cls(module, name or None, origin)

    def __str__(self) -> str:
        return self.module if self.name is None else f"{self.module}:{self.name}"

    def load(self) -> Any:
        """Import the module and return it, or the name in it. Raises PluginError with the cause chained."""
        try:
            module = importlib.import_module(self.module)
        except Exception as error:
            raise PluginError(
                f"{self.origin}: {self.module} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        return module if self.name is None else attribute(module, self.name, self.origin)


def attribute(module: Any, name: str, origin: Origin) -> Any:
    """`module.name`, or a PluginError that names the nearest thing there is."""
    try:
        return getattr(module, name)
    except AttributeError:
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PluginError(f"{origin}: {module.__name__} has no {name!r}.{hint}") from None


def find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """The spec of a module whose parents are not imported for it (`importlib.util.find_spec` would)."""
    if name in sys.modules:
        return sys.modules[name].__spec__
    path = None
    parent = name.rpartition(".")[0]
    if parent:
        spec = find_module(parent)
        if spec is None or spec.submodule_search_locations is None:
            return None
        path = list(spec.submodule_search_locations)
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None
