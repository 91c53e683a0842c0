"""A config's model without values: what each decoder layer is made of, and what stands around the layers.

Two layers with equal signatures compute the same function of their weights and of their place: they have the same
modules, shapes, settings and entries in the config's per-layer lists.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rtp_runtime.check.cut.edits import Edits, TextPart, transformers_config
from rtp_runtime.check.names import find_layers
from rtp_runtime.errors import ConfigError, NotJudgedError

MANY = 5
"""Of as many layers, a setting that is another in each of them tells where a layer stands, not what it is."""

Facts = dict[tuple[str, str], Any]
"""(module inside the layer, setting) -> value."""


@dataclass(frozen=True)
class Outline:
    """The model of a config on the meta device."""

    model: Any
    config: Any
    """transformers' config that it is built from."""
    layers: tuple[str, ...]
    """Dotted names of the decoder layers."""
    signatures: tuple[Facts, ...]
    """Of each layer; what only tells its place is left out."""
    around: Facts
    """Parameters outside the layers and their shapes."""

    def same_around(self, other: Outline) -> bool:
        """Whether the two differ in their layers alone."""
        return self.around == other.around


def outline(part: TextPart, edits: Edits | None = None, placed: frozenset[tuple[str, str]] = frozenset()) -> Outline:
    """The model that a config describes, edited.

    Args:
        part: the config.
        edits: what to change in it.
        placed: settings that only tell a layer's place (`place_settings`).

    Raises:
        NotJudgedError: transformers has no such model, or cannot build one from this config.
    """
    import torch

    from rtp_runtime.testing.checkpoints import transformers_class

    raw = part.edited(edits or {})
    try:
        config = transformers_config(raw)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of shapes without elements, where a number that was tried makes them
            model = transformers_class(part.architecture, config)._from_config(config, attn_implementation="eager")
    except NotJudgedError:
        raise
    except ConfigError as error:
        raise NotJudgedError(str(error)) from error
    except Exception as error:  # whatever a modeling file raises is about this config
        raise NotJudgedError(f"transformers cannot build this config: {type(error).__name__}: {error}") from error
    text = config.get_text_config()
    layers = find_layers(model)
    facts = [_facts(model.get_submodule(name)) for name in layers]
    for name in part.per_layer():
        for place, value in enumerate(text.to_dict()[name][: len(layers)]):
            facts[place]["config", name] = repr(value)
    signatures = tuple({key: value for key, value in each.items() if key not in placed} for each in facts)
    around = {
        (name, ""): tuple(value.shape)
        for name, value in (*model.named_parameters(), *model.named_buffers())
        if not any(name.startswith(f"{layer}.") for layer in layers)
    }
    return Outline(model, config, tuple(layers), signatures, around)


def place_settings(part: TextPart) -> frozenset[tuple[str, str]]:
    """Settings of the layers that only tell where a layer stands: its index, a name made of it, of how many it is."""
    whole = outline(part)
    depth = {key for facts in whole.signatures for key in facts if (key[1],) == part.key("num_hidden_layers")}
    return _place_only(whole.signatures) | depth


def _facts(layer: nn.Module) -> Facts:
    facts: Facts = {}
    for name, module in layer.named_modules():
        facts[name, "class"] = type(module).__qualname__
        for key, value in vars(module).items():
            if not key.startswith("_") and key != "training" and _is_plain(value):
                facts[name, key] = _frozen(value)
    for name, value in (*layer.named_parameters(), *layer.named_buffers()):
        facts[name, "shape"] = tuple(value.shape)
    return facts


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | enum.Enum)


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    return str(value) if isinstance(value, enum.Enum) else value


def _place_only(facts: Sequence[Facts]) -> frozenset[tuple[str, str]]:
    found = set()
    for key in {key for each in facts for key in each if key[1] not in ("class", "shape")}:
        values = {place: each[key] for place, each in enumerate(facts) if key in each}
        numbers = [value for value in values.values() if isinstance(value, int) and not isinstance(value, bool)]
        is_index = len(numbers) == len(values) and all(value == place for place, value in values.items())
        if is_index or (len(values) >= MANY and len(set(map(repr, values.values()))) == len(values)):
            found.add(key)
    return frozenset(found)


def by_kind(signatures: tuple[Facts, ...]) -> list[list[int]]:
    """Layers of equal signature together, in the order of their first layer."""
    kinds: list[tuple[Mapping[tuple[str, str], Any], list[int]]] = []
    for place, signature in enumerate(signatures):
        same = next((places for known, places in kinds if known == signature), None)
        if same is None:
            kinds.append((signature, [place]))
        else:
            same.append(place)
    return [places for _, places in kinds]
