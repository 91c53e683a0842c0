"""All loaded plugins as one: what they provide, where they conflict, and which definition serves an architecture."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType

from rtp_runtime.errors import PluginError, UnsupportedModelError
from rtp_runtime.model.registry import ModelDefinition
from rtp_runtime.plugins.failures import PluginFailure
from rtp_runtime.plugins.registries import Command, Extension, ScratchRegistries

FAMILIES = {"Qwen": "qwen", "Deepseek": "deepseek", "DeepSeek": "deepseek", "Glm": "glm", "MiniMax": "minimax"}
"""How architectures of a known family begin, and the folder under plugins/ (distribution rtp-plugin-<it>)."""


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """A plugin whose hooks have all returned."""

    name: str
    distribution: str | None
    version: str | None
    module: str
    hooks: tuple[str, ...]
    architectures: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Commands:
    """The sub-commands that plugins add."""

    commands: tuple[Command, ...] = ()

    def names(self) -> list[str]:
        return sorted({command.name for command in self.commands})

    def summaries(self) -> dict[str, str]:
        """Each name and its line for `rtp --help`."""
        return {name: self._claims(name)[0].summary for name in self.names()}

    def __contains__(self, name: str) -> bool:
        return any(command.name == name for command in self.commands)

    def load(self, name: str) -> ModuleType:
        """Import the module of a command. Raises PluginError when two plugins add it or it lacks its functions."""
        claims = self._claims(name)
        if len(claims) > 1:
            owners = " and ".join(str(command.target.origin) for command in claims)
            raise PluginError(f"`rtp {name}` is added by {owners}. Uninstall one.")
        module: ModuleType = claims[0].target.load()
        missing = [part for part in ("configure", "run") if not callable(getattr(module, part, None))]
        if missing:
            raise PluginError(f"{claims[0].target.origin}: {module.__name__} has no {' and no '.join(missing)}.")
        return module

    def _claims(self, name: str) -> list[Command]:
        return [command for command in self.commands if command.name == name]


@dataclass(frozen=True, slots=True)
class Plugins:
    """Everything that the plugins of this process provide, and those that failed."""

    loaded: tuple[LoadedPlugin, ...] = ()
    failures: tuple[PluginFailure, ...] = ()
    models: tuple[ModelDefinition, ...] = ()
    weights: tuple[Extension, ...] = ()
    states: tuple[Extension, ...] = ()
    ops: tuple[Extension, ...] = ()
    parsers: tuple[Extension, ...] = ()
    processors: tuple[Extension, ...] = ()
    commands: Commands = Commands()

    def resolve(self, architecture: str) -> ModelDefinition:
        """The definition that serves `architecture`.

        Raises UnsupportedModelError when no plugin provides it (repeating what failed and what to install), and
        PluginError when several do and none replaces the others.
        """
        claims = self._claims(architecture)
        if not claims:
            raise UnsupportedModelError("\n".join(self._unsupported(architecture)))
        if len(claims) > 1:
            raise PluginError(_conflict(architecture, claims))
        return claims[0]

    def conflicts(self) -> list[str]:
        """A line for each architecture that several plugins claim."""
        architectures = dict.fromkeys(model.architecture for model in self.models)
        claims = {architecture: self._claims(architecture) for architecture in architectures}
        return [_conflict(architecture, several) for architecture, several in claims.items() if len(several) > 1]

    def _claims(self, architecture: str) -> list[ModelDefinition]:
        claims = [model for model in self.models if model.architecture == architecture]
        replaced = {claim.replaces for claim in claims if claim.replaces is not None}
        kept = [claim for claim in claims if not replaced & {claim.plugin, claim.distribution}]
        return kept or claims

    def _unsupported(self, architecture: str) -> list[str]:
        lines = [f"no plugin provides {architecture}."]
        known = sorted({model.architecture for model in self.models})
        near = difflib.get_close_matches(architecture, known, n=1, cutoff=0.8)
        if near:
            lines[0] += f" The nearest that is provided is {near[0]}."
        lines += [f"{failure} (rtp plugins --debug shows the traceback)" for failure in self.failures]
        family = next((family for prefix, family in FAMILIES.items() if architecture.startswith(prefix)), None)
        if family is not None:
            lines.append(self._family_hint(family))
        lines.append("`rtp enable MODEL` says what is missing, and writes a plugin where it can.")
        return lines

    def _family_hint(self, family: str) -> str:
        distribution = f"rtp-plugin-{family}"
        for plugin in self.loaded:
            if plugin.distribution == distribution:
                return (
                    f"{distribution} {plugin.version}, which serves this family, is installed and lacks it: upgrade it."
                )
        return f"The package {distribution} serves this family: install it (in rtp's repository, plugins/{family})."


def merge(loaded: Sequence[tuple[LoadedPlugin, ScratchRegistries]], failures: Iterable[PluginFailure]) -> Plugins:
    """Join the scratch registries of plugins that loaded."""
    scratches = [scratch for _, scratch in loaded]
    return Plugins(
        loaded=tuple(plugin for plugin, _ in loaded),
        failures=tuple(failures),
        models=tuple(model for scratch in scratches for model in scratch.models),
        weights=tuple(extension for scratch in scratches for extension in scratch.weights),
        states=tuple(extension for scratch in scratches for extension in scratch.states),
        ops=tuple(extension for scratch in scratches for extension in scratch.ops),
        parsers=tuple(extension for scratch in scratches for extension in scratch.parsers),
        processors=tuple(extension for scratch in scratches for extension in scratch.processors),
        commands=Commands(tuple(command for scratch in scratches for command in scratch.app)),
    )


def _conflict(architecture: str, claims: Sequence[ModelDefinition]) -> str:
    owners = " and ".join(str(claim.target.origin) for claim in claims)
    return (
        f"{architecture} is provided by {owners}. Uninstall one, or let one say "
        f"models.add({architecture!r}, …, replaces={claims[0].distribution or claims[0].plugin!r})."
    )
