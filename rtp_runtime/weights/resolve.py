"""A layout with every name written out: one entry per parameter, ready to be audited, planned and loaded."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rtp_runtime.errors import PluginError
from rtp_runtime.weights.descriptors import Layout, Skip, Source, Tie, Weight
from rtp_runtime.weights.dtypes import BITS
from rtp_runtime.weights.lowering import Units, lower
from rtp_runtime.weights.operations import named, shape


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter or persistent buffer, and the lowered tree that makes it."""

    name: str
    source: Source
    dtype: str
    """"model" or a pinned dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        return shape(self.source)

    def dtype_in(self, model_dtype: str) -> str:
        """The dtype it is held in when the model runs in `model_dtype`."""
        return model_dtype if self.dtype == "model" else self.dtype


@dataclass(frozen=True, slots=True)
class ResolvedLayout:
    """All parameters of a layout on one rank."""

    name: str
    parameters: tuple[Parameter, ...]
    ties: tuple[Tie, ...]
    skips: tuple[Skip, ...]

    @property
    def by_name(self) -> dict[str, Parameter]:
        """Parameters by name, without those that are tied."""
        return {parameter.name: parameter for parameter in self.parameters}

    def skip_reason(self, tensor: str) -> str | None:
        """Why a checkpoint tensor is left out on purpose, or None."""
        return next((skip.reason for skip in self.skips if re.fullmatch(skip.pattern, tensor)), None)


def resolve(layout: Layout, units: Units | None = None) -> ResolvedLayout:
    """Write out a layout for a rank that holds `units`. Raises PluginError for descriptors that contradict others."""
    parameters: dict[str, Parameter] = {}
    ties, skips = [], []
    for descriptor in layout.descriptors:
        match descriptor:
            case Weight():
                for parameter in _write_out(descriptor, units or {}):
                    _refuse_twice(parameter.name, parameters, layout)
                    parameters[parameter.name] = parameter
            case Tie():
                ties.append(descriptor)
            case Skip(pattern=pattern):
                _check_pattern(pattern)
                skips.append(descriptor)
    for tie in ties:
        _refuse_twice(tie.parameter, parameters, layout)
        if tie.to not in parameters:
            raise PluginError(f"Layout {layout.name!r} ties {tie.parameter} to {tie.to}, which it does not describe.")
    return ResolvedLayout(layout.name, tuple(parameters.values()), tuple(ties), tuple(skips))


def _write_out(weight: Weight, units: Units) -> Iterator[Parameter]:
    if weight.dtype != "model" and weight.dtype not in BITS:
        raise PluginError(f'{weight.parameter}: dtype {weight.dtype!r} is not "model" or one of {", ".join(BITS)}.')
    for values in itertools.product(*weight.over.values()):
        fields: Mapping[str, int] = dict(zip(weight.over, values, strict=True))
        yield Parameter(named(weight.parameter, fields), lower(weight.source, fields, units), weight.dtype)


def _refuse_twice(name: str, parameters: Mapping[str, Parameter], layout: Layout) -> None:
    if name in parameters:
        raise PluginError(f"Layout {layout.name!r} describes {name} twice. One descriptor makes a parameter.")


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise PluginError(f"Skip({pattern!r}): not a regular expression ({error}).") from error
