"""Who serves a config, and what that model declares: known before anything is built or a header is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rtp_runtime.errors import PluginError, RtpError, UnsupportedModelError
from rtp_runtime.model.config import ModelConfig
from rtp_runtime.model.registry import ModelDefinition, ModelImplementation
from rtp_runtime.plugins import Plugins
from rtp_runtime.state.descriptors import StateDescriptors
from rtp_runtime.weights.descriptors import Layout, WeightDescriptors

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served:
    """A config and the plugin's model that serves it, with both declarations made."""

    config: ModelConfig
    definition: ModelDefinition
    implementation: ModelImplementation
    weights: WeightDescriptors
    states: StateDescriptors
    state_policies: Mapping[str, StateDescriptors] = field(default_factory=dict)
    """Other ways to keep the state, by name."""


def find_served(config: ModelConfig, plugins: Plugins) -> Served:
    """The model that serves `config`. Raises UnsupportedModelError, or PluginError for a broken declaration."""
    definition = plugins.resolve(config.architecture)
    implementation = definition.load()
    _check_accepted(definition, implementation, config)
    weights = _declared(definition, "weight_descriptors", implementation.weight_descriptors, WeightDescriptors, config)
    states = _declared(definition, "state_descriptors", implementation.state_descriptors, StateDescriptors, config)
    policies = _added_policies(definition, states, config, plugins)
    return Served(config, definition, implementation, _with_added_layouts(weights, config, plugins), states, policies)


def call_plugin(definition: ModelDefinition, what: str, function: Callable[..., T], *args: Any) -> T:
    """Call code of the plugin; what it raises that is not an error of rtp becomes a PluginError that names it."""
    try:
        return function(*args)
    except RtpError:
        raise
    except Exception as error:
        raise PluginError(
            f"{definition.target.origin}: {what} of {definition.architecture} failed: {type(error).__name__}: {error}. "
            "Run with --debug to see where."
        ) from error


def _check_accepted(definition: ModelDefinition, implementation: ModelImplementation, config: ModelConfig) -> None:
    if implementation.accepts is None:
        return
    answer = call_plugin(definition, "accepts", implementation.accepts, config)
    if not getattr(answer, "ok", answer):
        reasons = "; ".join(getattr(answer, "reasons", ())) or "it gives no reason"
        raise UnsupportedModelError(
            f"{config.path or config.architecture}: {definition.target.origin} provides {config.architecture} but "
            f"declines this config: {reasons}."
        )


def _with_added_layouts(weights: WeightDescriptors, config: ModelConfig, plugins: Plugins) -> WeightDescriptors:
    first, *others = weights.layouts
    for extension in plugins.weights:
        if extension.subject != config.architecture:
            continue
        added = extension.load()(config)
        if not isinstance(added, WeightDescriptors):
            raise PluginError(f"{extension.target.origin}: {extension.target} returned no WeightDescriptors.")
        others.append(Layout(extension.name, added.layouts[0].descriptors))
    return WeightDescriptors(*first.descriptors, name=first.name, others=others)


def _added_policies(
    definition: ModelDefinition, own: StateDescriptors, config: ModelConfig, plugins: Plugins
) -> dict[str, StateDescriptors]:
    """The states that plugins have registered besides the model's own; they differ in policy, not in what there is."""
    found: dict[str, StateDescriptors] = {}
    for extension in plugins.states:
        if extension.subject == config.architecture:
            states = call_plugin(definition, f"state policy {extension.name!r}", extension.load(), config)
            if not isinstance(states, StateDescriptors) or _content(states) != _content(own):
                raise PluginError(
                    f"{extension.target.origin}: {extension.target} does not return the states of "
                    f"{config.architecture} under other policies: its layers, names, kinds, axes and dtypes must stay."
                )
            found[extension.name] = states
    return found


def _content(states: StateDescriptors) -> list[tuple[Any, ...]]:
    return [(layer, name, type(state), dict(state.axes), state.dtype) for layer, name, state in states.named()]


def _declared(
    definition: ModelDefinition, name: str, function: Callable[[Any], Any], kind: type[Any], config: Any
) -> Any:
    found = call_plugin(definition, name, function, config)
    if not isinstance(found, kind):
        raise PluginError(
            f"{definition.target.origin}: {name} of {definition.architecture} returned {type(found).__name__}, "
            f"not {kind.__name__}."
        )
    return found
