"""Dotted names of modules: which are decoder layers, which layer a name belongs to, in which order they execute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

ATTENTION = ":attention"
"""Suffix of the probes at an attention interface, whose module is the one that called it."""


@dataclass(frozen=True, slots=True)
class Naming:
    """How the names of one model read in another whose decoder stands elsewhere, as inside a vision-language model."""

    theirs: str = ""
    """Dotted name of the module that holds the list of decoder layers."""
    ours: str = ""

    def ours_of(self, name: str) -> str | None:
        """Our name; None for a module around the decoder, which has no counterpart."""
        if self.theirs == self.ours:
            return name or None
        if name == self.theirs or name.startswith(f"{self.theirs}."):
            return (self.ours + name[len(self.theirs) :]).lstrip(".") or None
        return None if not name or self.theirs.startswith(f"{name}.") else name


SAME_NAMES = Naming()


def match_names(theirs: Iterable[str], ours: Iterable[str]) -> Naming:
    """The naming that takes their decoder layers for ours; `SAME_NAMES` if either side has none."""
    one, other = next(iter(theirs), None), next(iter(ours), None)
    if one is None or other is None:
        return SAME_NAMES
    theirs_of, ours_of = one.split("."), other.split(".")
    while theirs_of and ours_of and theirs_of[-1] == ours_of[-1]:
        theirs_of.pop()
        ours_of.pop()
    return Naming(".".join(theirs_of), ".".join(ours_of))


def find_layers(model: nn.Module) -> dict[str, int]:
    """Dotted name -> index of the decoder layers: of the outermost lists of modules, the one with most parameters."""
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    }
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    depth = _declared_depth(model)
    # Beside a few wide layers, a tower of images may hold more.
    outer = [name for name in outer if len(lists[name]) == depth] or outer
    if not outer:
        return {}
    best = max(outer, key=lambda name: sum(p.numel() for p in lists[name].parameters()))
    return {f"{best}.{index}": index for index in range(len(lists[best]))}


def _declared_depth(model: nn.Module) -> int | None:
    """How many decoder layers the config of a transformers model says that its language model has."""
    text = getattr(getattr(model, "config", None), "get_text_config", None)
    return getattr(text(), "num_hidden_layers", None) if text is not None else None


def layer_of(name: str, layers: Mapping[str, int]) -> int | None:
    """Index of the decoder layer that `name` is, or stands in; None outside the layers."""
    for prefix, index in layers.items():
        if name == prefix or name.startswith((f"{prefix}.", f"{prefix}:")):
            return index
    return None


def parent_of(name: str) -> str:
    return name.rpartition(".")[0]


def relative_name(name: str, layers: Mapping[str, int]) -> str:
    """The name inside its layer (`self_attn.q_proj`), or the whole name outside the layers."""
    for prefix in layers:
        if name.startswith(f"{prefix}."):
            return name[len(prefix) + 1 :]
    return name


def holds_layers(name: str, layers: Iterable[str]) -> bool:
    """Whether the module `name` contains the decoder layers."""
    return any(layer.startswith(f"{name}.") for layer in layers)


def is_inside(name: str, blocks: Iterable[str]) -> bool:
    """Whether the module stands somewhere in one of the blocks, and is not the block itself."""
    return any(name.startswith(f"{block}.") for block in blocks)


def ranges(layers: Sequence[int]) -> str:
    """Layers in words: 0, 1, 2 and 5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
