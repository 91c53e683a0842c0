"""The rotary parameters of a config, in whichever form it holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rtp_runtime.errors import ConfigError

if TYPE_CHECKING:
    from rtp_kernel.components import RopeParameters


def rope_parameters(config: Any, layer_type: str | None = None) -> RopeParameters:
    """`config.rope_parameters` (of one layer type where they differ) as the kernel's `RopeParameters`.

    Understands the nested form and the flat keys of older files. Raises ConfigError when the file itself holds no
    theta, whatever default a library would put in, or when the type is unknown or lacks a number.
    """
    from rtp_kernel.components import RopeParameters

    values = getattr(config, "rope_parameters", None)
    if not isinstance(values, Mapping):
        values = _flat(config)
    if layer_type is not None and isinstance(values.get(layer_type), Mapping):
        values = values[layer_type]
    raw = getattr(config, "raw", None)
    if raw is not None and not _has_theta(raw):
        raise ConfigError(
            f"{config.path or 'the config'}: holds no rope_theta, neither at its top nor in rope_parameters. Every "
            'angle follows from it, so it has no default. Add the value of the training, say "rope_theta": 10000.0.'
        )
    try:
        # Only what the table reads counts as read; a plugin that looks at partial_rotary_factor reads that itself.
        known = {"rope_theta", "theta", "rope_type", "type", *(spec.name for spec in fields(RopeParameters))}
        return RopeParameters.from_dict({key: values[key] for key in values if key in known})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{getattr(config, 'path', None) or 'the config'}: {error}") from error


def _flat(config: Any) -> dict[str, Any]:
    scaling = getattr(config, "rope_scaling", None)
    values = dict(scaling.items()) if isinstance(scaling, Mapping) else {}
    theta = getattr(config, "rope_theta", None)
    return values if theta is None else {**values, "rope_theta": theta}


def _has_theta(part: Mapping[str, Any]) -> bool:
    if isinstance(part.get("rope_theta"), (int, float)):
        return True
    return any(isinstance(value, Mapping) and _has_theta(value) for value in part.values())
