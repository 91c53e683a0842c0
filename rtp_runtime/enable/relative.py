"""Relatives: an installed model with the same tensors, of which the unseen one differs in a few listed ways.

Found by trial: an installed model whose descriptors account for every tensor of the small reference is subclassed, and
the differences that models of one family show are tried one after another until the proof holds.
"""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtp_kernel.ops.activation import ACTIVATIONS
from rtp_kernel.ops.rotary import LAYOUTS
from rtp_runtime.enable.code import literal
from rtp_runtime.enable.imports import import_lines
from rtp_runtime.enable.names import PluginNames
from rtp_runtime.enable.pins import find_pins
from rtp_runtime.enable.prove import first_error, importable
from rtp_runtime.enable.reference import Reference
from rtp_runtime.enable.templates import render
from rtp_runtime.hookspecs import API_VERSION
from rtp_runtime.model.config import ModelConfig, load_config
from rtp_runtime.model.registry import ModelDefinition
from rtp_runtime.plugins import Plugins
from rtp_runtime.testing.compare import TOLERANCE
from rtp_runtime.weights.audit import choose_layout
from rtp_runtime.weights.headers import read_headers

MOST_DIFFERENCES = 2
"""With more, a file of its own says better what the model is."""


@dataclass(frozen=True)
class Difference:
    """One way in which a model differs from its relative."""

    words: str
    part: str = ""
    """The component of which every instance is changed."""
    change: str = ""
    """An assignment to `part`."""
    logits: str = ""
    """Code over `logits` and `config` that gives the logits."""


@dataclass(frozen=True)
class Relative:
    """The installed model, and the differences."""

    definition: ModelDefinition
    differences: tuple[Difference, ...] = ()

    @property
    def requirement(self) -> str:
        """What the plugin must have installed."""
        version = f">={self.definition.version}" if self.definition.version else ""
        return f"{self.definition.distribution or self.definition.plugin}{version}"

    def describe(self) -> list[str]:
        """What was recognised, in words."""
        given = f"{self.definition.architecture} of {self.definition.distribution or self.definition.plugin}"
        return [f"relative: the tensors and the computation of {given}", *(f"but: {d.words}" for d in self.differences)]


def find_relative(
    reference: Reference, names: PluginNames, plugins: Plugins, config: ModelConfig
) -> tuple[Relative, str] | None:
    """The relative of the small reference and the text of the model file; None when no installed model is one."""
    with tempfile.TemporaryDirectory(prefix="rtp-enable-") as temporary:
        checkpoint = Path(temporary) / "checkpoint"
        reference.save(checkpoint)
        small = load_config(checkpoint)
        for definition in plugins.models:
            if definition.plugin and _same_tensors(definition, small, checkpoint):
                trial = _Trial(reference, checkpoint, names, pins_of(reference, config, definition))
                differences = trial.search(definition)
                if differences is not None:
                    found = Relative(definition, differences)
                    return found, trial.text(definition, differences)
    return None


def pins_of(reference: Reference, config: ModelConfig, definition: ModelDefinition) -> list[tuple[str, str]]:
    """Keys that the reference reads and the relative does not, with what they were as code."""
    text = "".join(inspect.getsource(inspect.getmodule(cls)) for cls in _lineage(definition))  # type: ignore[arg-type]
    pins = find_pins(reference, config.hf)
    return [(key, literal(value)) for key, value in sorted(pins.items()) if not re.search(rf"\b{key}\b", text)]


def _lineage(definition: ModelDefinition) -> list[type]:
    """The model's class and those of its package that it derives from."""
    cls = definition.load().model_class
    package = cls.__module__.partition(".")[0]
    return [base for base in cls.__mro__ if base.__module__.partition(".")[0] == package]


def _same_tensors(definition: ModelDefinition, config: ModelConfig, checkpoint: Path) -> bool:
    """Whether the model's descriptors, over this config, account for every tensor in its shape."""
    try:
        implementation = definition.load()
        implementation.state_descriptors(config)
        choose_layout(
            implementation.weight_descriptors(config), read_headers(checkpoint), "float32", config.tie_flags()
        )
    except Exception:  # tensors that are others, or a plugin's code, over a config that it was not written for
        return False
    return True


class _Trial:
    """Writes the subclass with given differences and measures it."""

    def __init__(
        self, reference: Reference, checkpoint: Path, names: PluginNames, pins: Sequence[tuple[str, str]]
    ) -> None:
        self._reference, self._checkpoint, self._names, self._pins = reference, checkpoint, names, pins

    def search(self, definition: ModelDefinition) -> tuple[Difference, ...] | None:
        """The fewest differences with which the logits are the reference's; None when a few are not enough."""
        chosen: tuple[Difference, ...] = ()
        error = self._error(definition, chosen)
        known = list(differences(self._reference.config))
        while error > TOLERANCE and len(chosen) < MOST_DIFFERENCES:
            tried = [(self._error(definition, (*chosen, one)), place) for place, one in enumerate(known)]
            best, place = min(tried)
            if not best < error / 2:
                return None
            error, chosen = best, (*chosen, known[place])
        return chosen if error <= TOLERANCE else None

    def _error(self, definition: ModelDefinition, chosen: tuple[Difference, ...]) -> float:
        files = {
            f"src/{self._names.package}/__init__.py": render(
                "init.py.jinja", names=self._names, api=API_VERSION, title=""
            ),
            f"src/{self._names.package}/{self._names.module}.py": self.text(definition, chosen),
        }
        with (
            tempfile.TemporaryDirectory(prefix="rtp-enable-") as temporary,
            importable(self._names, files, Path(temporary)) as plugins,
        ):
            try:
                return first_error(self._reference, self._checkpoint, plugins)
            except Exception:  # a plugin's code, changed on trial, over a config that it was not written for
                return float("inf")

    def text(self, definition: ModelDefinition, chosen: Sequence[Difference]) -> str:
        """The model file."""
        target, declines = definition.target, definition.load().accepts is not None
        values: dict[str, Any] = {
            "architecture": self._names.architecture,
            "parent": definition.architecture if target.name is None else target.name,
            "parent_module": target.module,
            "distribution": definition.distribution or definition.plugin,
            "changes": [each for each in chosen if each.change],
            "logits": [each for each in chosen if each.logits],
            "differences": chosen,
            "pinned": self._pins,
            "declines": declines,
            "lists": any(value.startswith("[") for _, value in self._pins),
        }
        body = render("relative.py.jinja", imports="", **values)
        taken = [values["parent"], "state_descriptors", "weight_descriptors"]
        own = [(target.module, [*taken, "accepts"] if declines and not self._pins else taken)]
        own += [(target.module, ["accepts as parent_accepts"])] if declines and self._pins else []
        imports = "\n".join(import_lines(body, *own))
        return render("relative.py.jinja", imports=imports, **values)


def differences(config: Any) -> Iterator[Difference]:
    """What members of one family differ in, with the numbers that this config offers."""
    for layout in LAYOUTS:
        yield Difference(f'heads are turned in the layout "{layout}"', "Rotary", f'part.layout = "{layout}"')
    for name in ACTIVATIONS:
        yield Difference(f'the activation is "{name}"', "GatedMLP", f'part.activation = "{name}"')
    yield Difference("norms multiply by 1 + w", "RMSNorm", "part.offset = 1.0")
    yield Difference("norms multiply by w", "RMSNorm", "part.offset = 0.0")
    for key, value in _numbers(config).items():
        if "eps" in key:
            yield Difference(f"norms add {key}", "RMSNorm", f"part.eps = config.{key}")
        if "attn" in key or "attention" in key or "scal" in key or "multiplier" in key:
            yield Difference(f"the softmax scale is {key}", "Attention", f"part.scale = config.{key}")
            if value > 0:
                yield Difference(f"the softmax scale is {key}**-0.5", "Attention", f"part.scale = config.{key}**-0.5")
        if "logit" in key or "scal" in key or "multiplier" in key:
            yield Difference(f"logits times {key}", logits=f"logits * config.{key}")
            yield Difference(f"logits over {key}", logits=f"logits / config.{key}")
        if "cap" in key:
            yield Difference(f"logits capped at {key}", logits=f"torch.tanh(logits / config.{key}) * config.{key}")


def _numbers(config: Any) -> Mapping[str, float]:
    found = {key: value for key, value in config.to_dict().items() if isinstance(value, int | float)}
    return {key: value for key, value in found.items() if not isinstance(value, bool) and value}
