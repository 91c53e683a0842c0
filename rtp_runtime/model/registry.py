"""Which architectures plugins provide: filled by hooks with strings, imported when a model is wanted.

Knows nothing of checkpoints; torch is imported by `ModelDefinition.load`, through the plugin's module, and not before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rtp_runtime.errors import PluginError
from rtp_runtime.lazy import LazyTarget, Origin, attribute


@dataclass(frozen=True, slots=True)
class ModelImplementation:
    """What a model's module holds: the computation and the two declarations."""

    model_class: type[Any]
    weight_descriptors: Callable[[Any], Any]
    state_descriptors: Callable[[Any], Any]
    accepts: Callable[[Any], Any] | None
    """config -> yes or no with reasons; None when the module does not say."""


@dataclass(frozen=True, slots=True)
class ModelDefinition:
    """An architecture as a plugin registered it."""

    architecture: str
    target: LazyTarget
    replaces: str | None = None
    """The plugin or distribution whose claim on this architecture is given up for this one."""

    @property
    def plugin(self) -> str:
        return self.target.origin.plugin

    @property
    def distribution(self) -> str | None:
        return self.target.origin.distribution

    @property
    def version(self) -> str | None:
        return self.target.origin.version

    def load(self) -> ModelImplementation:
        """Import the module and check what it must hold.

        Raises PluginError when it cannot be imported, or lacks the class or one of the declarations.
        """
        origin = self.target.origin
        module = LazyTarget(self.target.module, None, origin).load()
        model_class = attribute(module, self.target.name or self.architecture, origin)
        if not inspect.isclass(model_class):
            raise PluginError(f"{origin}: {model_class!r} of {module.__name__} is not a class.")
        return ModelImplementation(
            model_class=model_class,
            weight_descriptors=_function(module, "weight_descriptors", origin),
            state_descriptors=_function(module, "state_descriptors", origin),
            accepts=_function(module, "accepts", origin) if hasattr(module, "accepts") else None,
        )


class ModelRegistry:
    """The models of one plugin, filled by its `rtp_register_models`."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._definitions: dict[str, ModelDefinition] = {}

    def add(self, architecture: str, target: str, *, replaces: str | None = None) -> None:
        """Say that `target` ("package.module", or "package.module:Class") implements `architecture`.

        `architecture` is the name in a config's `architectures`. `replaces` names the plugin or distribution that
        provides it too and shall give way. Raises PluginError for a string that names nothing, or a second claim.
        """
        if not isinstance(architecture, str) or not architecture.isidentifier():
            raise PluginError(f'{architecture!r} is not the name of an architecture, such as "LlamaForCausalLM".')
        if architecture in self._definitions:
            raise PluginError(f"{architecture} is added twice by this plugin. Keep one.")
        self._definitions[architecture] = ModelDefinition(
            architecture, LazyTarget.parse(target, self._origin), replaces
        )

    def __iter__(self) -> Iterator[ModelDefinition]:
        return iter(self._definitions.values())


def _function(module: Any, name: str, origin: Origin) -> Callable[[Any], Any]:
    function = attribute(module, name, origin)
    if not callable(function):
        raise PluginError(f"{origin}: {name} of {module.__name__} is not a function of the config.")
    return function  # type: ignore[no-any-return]
