"""The body of a model file's `weight_descriptors` as blocks fill it: axes, tensors with a name, descriptors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rtp_runtime.enable.code import call, nested

LAYER = "LAYER"


@dataclass
class Declarations:
    """Grows block by block; the template puts it in place."""

    axes: dict[str, list[str]] = field(default_factory=dict)
    """Local variables that come first, by name: their lines."""
    tensors: dict[str, list[str]] = field(default_factory=dict)
    """Local variables that may use axes and layers."""
    items: list[str] = field(default_factory=list)
    """Descriptors, each perhaps of several lines."""

    layouts: dict[str, list[str]] = field(default_factory=dict)
    """Descriptors of one layout of checkpoints alone, by the variable that holds them; the hub's is the first."""


@dataclass(frozen=True)
class Place:
    """Where a block stands in the module tree, and the declarations that it adds to."""

    declarations: Declarations
    prefix: str
    """Code of what stands before the name, with a string that is open: `LAYER + "`, or `"model.`."""
    name: str
    """Dotted name of the module."""
    over: str = "layers"
    """The local variable with the layers in which it stands; "" outside the layers."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Names of parameters, as `name` and a leaf, that checkpoints call otherwise."""

    def child(self, name: str) -> Place:
        """A module inside it."""
        return dataclasses.replace(self, name=f"{self.name}.{name}")

    def local(self, name: str, code: str) -> str:
        """A variable before the axes, such as a head dim that no key holds; returns its name."""
        return self._keep(self.declarations.axes, name, lambda unique: [f"{unique} = {code}"])

    def axis(self, name: str, label: str, *arguments: str) -> str:
        """A named axis; returns the variable that holds it."""
        given = [f'"{label}"', *arguments]
        return self._keep(self.declarations.axes, name, lambda unique: call(f"{unique} = Axis(", given, indent=4))

    def tensor(self, name: str, head: str, arguments: Sequence[str]) -> str:
        """A source with a name: `head` + arguments, as `code.call` writes it; returns the variable."""
        return self._keep(
            self.declarations.tensors, name, lambda unique: call(f"{unique} = {head}", arguments, indent=4)
        )

    def _keep(self, kept: dict[str, list[str]], name: str, write: Callable[[str], list[str]]) -> str:
        taken = self.declarations.axes | self.declarations.tensors
        own = self.name.rpartition(".")[2]
        for unique in (name, f"{own}_{name}", *(f"{own}_{name}_{i}" for i in range(2, 99))):
            lines = write(unique)
            if taken.get(unique, lines) == lines:
                kept[unique] = lines
                return unique
        raise AssertionError(name)

    def leaf(self, name: str) -> str:
        """Code of a parameter's name."""
        return f'{self.prefix}{self.name}.{name}"'

    def source(self, name: str) -> str:
        """Code of the checkpoint's name of a parameter."""
        whole = f"{self.name}.{name}"
        return f'{self.prefix}{self.renames.get(whole, whole)}"'

    def weight(self, name: str, *dims: str) -> None:
        """A parameter that is one tensor of the checkpoint."""
        if self.source(name) != self.leaf(name):
            self.made(name, f"FromCheckpoint({self.source(name)}, {shape(dims)})")
            return
        over = [] if self.over in ("layers", "") else [f"over={self.over}"]
        self.declarations.items.append("\n".join(call("weight(", [self.leaf(name), *dims, *over], indent=9)))

    def made(self, name: str, source: str, *, pinned: str | None = None, layout: str | None = None) -> None:
        """A parameter made of other tensors; `source` is code, perhaps of several lines.

        `pinned`: its dtype whatever the model's. `layout`: the variable of the layout that alone has this descriptor.
        """
        arguments = [f"parameter={self.leaf(name)}", f"source={source}", *([f"over={self.over}"] if self.over else [])]
        arguments += [f'dtype="{pinned}"'] if pinned else []
        items = self.declarations.items if layout is None else self.declarations.layouts.setdefault(layout, [])
        items.append("\n".join(call("Weight(", arguments, explode=True)))


def shape(dims: Sequence[str]) -> str:
    """A tuple as code."""
    return f"({', '.join(dims)}{',' if len(dims) == 1 else ''})"


def joined(sources: Sequence[str]) -> str:
    """`Concat` of sources as the value of an argument of a descriptor."""
    return nested("Concat(", [nested("(", sources, indent=16)], indent=12)
