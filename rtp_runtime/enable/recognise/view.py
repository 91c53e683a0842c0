"""What every recogniser is given: the small reference, its recording, and the few questions all of them ask."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from rtp_runtime.enable.blocks import Projection
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.imports import PUBLIC
from rtp_runtime.enable.match import Expression, express
from rtp_runtime.enable.recognise.hub import Hub
from rtp_runtime.enable.recognise.tables import Table, find_tables
from rtp_runtime.enable.recording import Call, Recording
from rtp_runtime.enable.reference import Reference


@dataclass(frozen=True, eq=False)
class View:
    """A reference and one run of it."""

    reference: Reference
    recording: Recording
    bridging: bool = False
    """Whether blocks that mix tokens are taken from transformers, because ours did not compute the same."""

    @cached_property
    def tables(self) -> list[Table]:
        """Every rotary table of the reference."""
        return find_tables(self.reference.model)

    @cached_property
    def hub(self) -> Hub:
        """The names in checkpoints."""
        return Hub.of(self.reference)

    @property
    def config(self) -> Any:
        return self.reference.config

    def keys_of(self, module: nn.Module, *more: str) -> list[str]:
        """Config keys that the code of this module's class reads."""
        name = type(module).__name__
        return [key for key, readers in self.reference.reads.items() if name in readers] + list(more)

    def keys_inside(self, name: str) -> list[str]:
        """Config keys that the code of the module `name`, or of one inside it, reads."""
        found = [key for module in self.module(name).modules() for key in self.keys_of(module)]
        return list(dict.fromkeys(found))

    def number(self, value: float, keys: Iterable[str]) -> str:
        """`value` as code: over the config where a key explains it, else as it is."""
        found = express(value, self.config, keys)
        return repr(value) if found is None else found.code

    def express(self, value: float, keys: Iterable[str], block: str, what: str, prefer: str = "") -> Expression:
        """`value` as code over the config. Raises UnrecognisedError when no key explains it."""
        found = express(value, self.config, keys, prefer)
        if found is None:
            raise UnrecognisedError(
                block, f"{what} is {value:.6g}, which follows from none of the config keys that it reads.", "that rule"
            )
        return found

    def kept_in_float32(self, name: str) -> bool:
        """Whether the reference insists on float32 for the parameters of the module `name`."""
        model = self.reference.model
        lists = (getattr(model, f"_keep_in_fp32_modules{kind}", None) or () for kind in ("", "_strict"))
        return bool({part for each in lists for part in each} & set(name.split(".")))

    def module(self, name: str) -> nn.Module:
        found: nn.Module = self.reference.model.get_submodule(name)
        return found

    def class_name(self, name: str) -> str:
        """What the model file calls the class of a module: as the reference does, unless a component is called so."""
        found, model = type(self.module(name)).__name__, type(self.reference.model).__name__
        taken = any(found in names for names in PUBLIC.values())
        return f"{model.removesuffix('ForCausalLM').removesuffix('LMHeadModel')}{found}" if taken else found

    def label(self, name: str) -> str:
        """ "model.layers.0.mlp (LlamaMLP)"."""
        return f"{name} ({type(self.module(name)).__name__})"


def rows(tensor: Tensor, heads: int | None = None) -> Tensor:
    """[1, tokens, heads, dim], [1, heads, tokens, dim] or [1, tokens, width] -> [tokens, width].

    `heads` tells the two forms with four axes apart; it differs from the number of tokens.
    """
    if tensor.ndim == 4:
        if tensor.shape[1] == heads and tensor.shape[2] != heads:
            tensor = tensor.transpose(1, 2)
        return tensor.reshape(tensor.shape[1], -1)
    return tensor.reshape(-1, tensor.shape[-1])


def layer_index(name: str) -> int:
    """The number of the layer that the module `name` stands in."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def leaf(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def is_linear(module: nn.Module) -> bool:
    """Whether it is a matrix and perhaps a bias, as [out, in] or (Conv1D of transformers) as [in, out]."""
    return isinstance(module, nn.Linear) or transposed(module)


def transposed(module: nn.Module) -> bool:
    """Whether its weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def projection_of(call: Call, block: str, start: int = 0, size: int = 0, **more: Any) -> Projection:
    """The linear module that `call` ran, by its name inside the module `block`, and which part of its output is meant.

    `more`: further fields of `Projection`.
    """
    name = call.name.removeprefix(f"{block}.")
    return Projection(name, bias_of(call.module), start, size, transposed=transposed(call.module), **more)


def bias_of(module: nn.Module) -> bool:
    """Whether a projection has a bias."""
    return getattr(module, "bias", None) is not None


def linears(calls: Iterable[Call]) -> list[Call]:
    return [call for call in calls if is_linear(call.module)]
