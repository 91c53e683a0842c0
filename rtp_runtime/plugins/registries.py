"""What plugins register besides models: checkpoint layouts, state policies, ops, parsers, processors, commands.

Each registry is filled by one plugin alone and holds strings; `catalogue.py` merges those of all plugins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rtp_runtime.errors import PluginError
from rtp_runtime.lazy import LazyTarget, Origin
from rtp_runtime.model.registry import ModelRegistry


@dataclass(frozen=True, slots=True)
class Extension:
    """Something that a plugin adds under a name to a subject (an architecture, an op, a kind of parser)."""

    subject: str
    name: str
    target: LazyTarget

    def load(self) -> Any:
        """Import it. Raises PluginError."""
        return self.target.load()


class ExtensionRegistry:
    """The extensions of one kind that one plugin adds."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._extensions: dict[tuple[str, str], Extension] = {}

    def add(self, subject: str, name: str, target: str) -> None:
        """Add `target` ("package.module:name") under `name` to `subject`. Raises PluginError."""
        _require_text(subject, name)
        if (subject, name) in self._extensions:
            raise PluginError(f"{name!r} is added twice to {subject!r} by this plugin. Keep one.")
        lazy = LazyTarget.parse(target, self._origin, named=True)
        self._extensions[subject, name] = Extension(subject, name, lazy)

    def __iter__(self) -> Iterator[Extension]:
        return iter(self._extensions.values())


class OpRegistrations:
    """The implementations of ops that one plugin adds. Whether an op exists is known when the kernels are loaded."""

    def __init__(self, origin: Origin) -> None:
        self._registry = ExtensionRegistry(origin)

    def add(self, op: str, target: str) -> None:
        """Add an implementation ("package.module:name") of `op`. Raises PluginError."""
        self._registry.add(op, str(target), target)

    def __iter__(self) -> Iterator[Extension]:
        return iter(self._registry)


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command of `rtp` that a plugin adds."""

    name: str
    target: LazyTarget
    summary: str


class CommandRegistry:
    """The sub-commands that one plugin adds. `reserved` are those that rtp itself has."""

    def __init__(self, origin: Origin, reserved: tuple[str, ...] = ()) -> None:
        self._origin = origin
        self._reserved = reserved
        self._commands: dict[str, Command] = {}

    def add(self, name: str, target: str, summary: str) -> None:
        """Add `rtp name`: a module with `configure(parser)` and `run(args) -> int`. Raises PluginError."""
        _require_text(name, summary)
        if name in self._reserved:
            raise PluginError(f"`rtp {name}` is a command of rtp itself. Take another name.")
        if name in self._commands:
            raise PluginError(f"`rtp {name}` is added twice by this plugin. Keep one.")
        self._commands[name] = Command(name, LazyTarget.parse(target, self._origin, named=False), summary)

    def __iter__(self) -> Iterator[Command]:
        return iter(self._commands.values())


@dataclass(frozen=True, slots=True)
class ScratchRegistries:
    """The registries that the hooks of one plugin fill, kept apart until all its hooks have returned."""

    models: ModelRegistry
    weights: ExtensionRegistry
    states: ExtensionRegistry
    ops: OpRegistrations
    parsers: ExtensionRegistry
    processors: ExtensionRegistry
    app: CommandRegistry
    hooks: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, origin: Origin, reserved: tuple[str, ...] = ()) -> ScratchRegistries:
        """Empty registries for one plugin."""
        return cls(
            models=ModelRegistry(origin),
            weights=ExtensionRegistry(origin),
            states=ExtensionRegistry(origin),
            ops=OpRegistrations(origin),
            parsers=ExtensionRegistry(origin),
            processors=ExtensionRegistry(origin),
            app=CommandRegistry(origin, reserved),
        )

    def extended_architectures(self) -> set[str]:
        """Architectures to which the plugin adds, and which somebody must therefore provide."""
        return {extension.subject for registry in (self.weights, self.states) for extension in registry}


def _require_text(*values: object) -> None:
    for value in values:
        if not isinstance(value, str) or not value.strip():
            raise PluginError(f"{value!r} is not a name. Registries take non-empty strings.")
