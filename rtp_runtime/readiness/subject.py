"""What stands here now: the checkpoint, the plugins that serve it, the packages and the machine, all by content.

A record's conditions are taken from a subject before the work begins; whether a record is stale is asked of one too.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rtp_runtime import __version__
from rtp_runtime.errors import PluginError, UnsupportedModelError, UsageError
from rtp_runtime.model.checkpoint import resolve_checkpoint
from rtp_runtime.model.config import CONFIG_FILE, ModelConfig, load_config
from rtp_runtime.plugins import LoadedPlugin, ModelDefinition, Plugins
from rtp_runtime.readiness.checkpoint import Fingerprint, HashCache, Progress, fingerprint, weight_files
from rtp_runtime.readiness.content import Content, package_content
from rtp_runtime.readiness.record import Conditions, Package


@dataclass(frozen=True, slots=True)
class Code:
    """A package or plugin as it is installed now."""

    package: Package
    content: Content


@dataclass(frozen=True, slots=True)
class Subject:
    """A model here and now."""

    directory: Path
    checkpoint: Fingerprint
    plugins: tuple[Code, ...]
    """Empty when no plugin serves the model."""
    runtime: Code
    kernel: Code
    versions: Mapping[str, str]

    @property
    def contents(self) -> list[Content]:
        """Every list of files behind a digest."""
        codes = [*self.plugins, self.runtime, self.kernel]
        return [*self.checkpoint.parts.values(), *(code.content for code in codes)]

    def conditions(
        self,
        *,
        device: str,
        dtype: str,
        seed: int = 0,
        layout: str = "1",
        settings: Mapping[str, Any] | None = None,
    ) -> Conditions:
        """The conditions of a result obtained now. `device` as torch names it; its own name is looked up."""
        return Conditions(
            model=self.checkpoint.identity,
            plugins=tuple(code.package for code in self.plugins),
            runtime=self.runtime.package,
            kernel=self.kernel.package,
            versions=self.versions,
            device=device_name(device),
            dtype=dtype,
            layout=layout,
            seed=seed,
            machine=machine_name(),
            settings=settings or {},
        )


@dataclass(frozen=True, slots=True)
class _Places:
    """Modules to hash for one plugin: its hooks' and its models'."""

    plugin: LoadedPlugin
    modules: list[str] = field(default_factory=list)


def gather_subject(
    model: str,
    plugins: Plugins,
    cache: Path | None = None,
    progress: Progress | None = None,
    *,
    weights: bool = True,
) -> Subject:
    """The subject for a checkpoint directory, a hub id, or a bare config file, which has no weights.

    `cache`: where digests of weights are kept. `weights` False: do not read them.

    Raises:
        ModelError: no readable config, or a file that cannot be read.
    """
    path = Path(model).expanduser()
    directory = path.parent if path.is_file() else resolve_checkpoint(model)
    config = load_config(path if path.is_file() else directory)
    files = weight_files(directory) if weights and not path.is_file() else []
    file = config.path or directory / CONFIG_FILE
    return Subject(
        directory=directory,
        checkpoint=fingerprint(file, files, str(model), config.architecture, HashCache(cache), progress),
        plugins=_plugin_codes(config, plugins),
        runtime=package_code("rtp_runtime"),
        kernel=package_code("rtp_kernel"),
        versions={
            "python": platform.python_version(),
            **{name: version_of(name) for name in ("torch", "transformers")},
        },
    )


def package_code(name: str) -> Code:
    """One of our own packages; both are parts of one distribution and share its version."""
    content = package_content(name)
    return Code(Package(name=name, version=__version__, content=content.digest), content)


def version_of(distribution: str) -> str:
    """The installed version without its build ("+cpu"), which differs between machines that compute the same."""
    try:
        return metadata.version(distribution).partition("+")[0]
    except metadata.PackageNotFoundError:
        return "not installed"


def device_name(device: str) -> str:
    """What the device calls itself: a GPU's name, or the processor's."""
    if device.startswith("cuda"):
        import torch

        try:
            return str(torch.cuda.get_device_name(device))
        except (RuntimeError, AssertionError, ValueError) as error:
            raise UsageError(f'device "{device}" cannot be used here: {str(error).splitlines()[0]}') from error
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine() or "cpu"


def machine_name() -> str:
    """Host, processors that this process may use, system."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.node() or 'unnamed'}, {count} processors, {platform.system()} {platform.machine()}"


def _plugin_codes(config: ModelConfig, plugins: Plugins) -> tuple[Code, ...]:
    """The plugin that serves the model, then those that it builds on or that add to what it runs, by name."""
    try:
        definition = plugins.resolve(config.architecture)
    except (UnsupportedModelError, PluginError):
        return ()
    own, *others = _involved(definition, plugins)
    return tuple(_code(places) for places in [own, *sorted(others, key=lambda each: each.plugin.name)])


def _involved(definition: ModelDefinition, plugins: Plugins) -> list[_Places]:
    places = {plugin.name: _Places(plugin, [plugin.module]) for plugin in plugins.loaded}
    own = places[definition.plugin]
    own.modules.append(definition.target.module)
    found = {definition.plugin: own}
    for extension in (*plugins.ops, *plugins.weights, *plugins.states):
        adds = extension in plugins.ops or extension.subject == definition.architecture
        if adds:
            name = extension.target.origin.plugin
            places[name].modules.append(extension.target.module)
            found[name] = places[name]
    for name in _requirements(definition.distribution):
        for each in places.values():
            if each.plugin.distribution is not None and _plain(each.plugin.distribution) == name:
                found[each.plugin.name] = each
    return list(found.values())


def _requirements(distribution: str | None) -> Iterable[str]:
    """Names of the distributions that one requires, as they are compared."""
    if distribution is None:
        return ()
    lines = metadata.requires(distribution) or []
    return {_plain("".join(_name_part(line))) for line in lines}


def _name_part(line: str) -> Iterable[str]:
    for character in line.strip():
        if not (character.isalnum() or character in "-_."):
            return
        yield character


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _code(places: _Places) -> Code:
    plugin = places.plugin
    content = package_content(*places.modules)
    return Code(Package(name=plugin.name, version=plugin.version or "no version", content=content.digest), content)
