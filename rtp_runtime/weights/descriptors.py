"""What a model says of its weights: which checkpoint tensors make each parameter, by operations that only move values.

Torch-free: descriptors can be printed, checked and planned before a byte of weight is read. The four methods of each
operation (shape and dtype, apply, invert, needs) stand in `rtp_runtime.weights.operations`.

A name may hold `{layer}` and `{expert}` (any field of `over`): one descriptor then stands for many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Axis:
    """A named axis of `count` units of `unit` elements; tensor parallelism deals out whole units.

    `replicable`: fewer units than ranks are replicated rather than refused (kv heads).
    """

    name: str
    count: int
    unit: int = 1
    replicable: bool = False

    @property
    def size(self) -> int:
        return self.count * self.unit


Dim = int | Axis
"""An axis nobody splits (its size), or a named one."""


def sizes(dims: Sequence[Dim]) -> tuple[int, ...]:
    """Number of elements along each of `dims`."""
    return tuple(dim.size if isinstance(dim, Axis) else dim for dim in dims)


class Source:
    """Base of the operation tree. Leaves are `FromCheckpoint`; every other node moves the values of its parts."""


@dataclass(frozen=True, slots=True)
class FromCheckpoint(Source):
    """A checkpoint tensor as it is: its name and logical shape."""

    name: str
    dims: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Concat(Source):
    """Parts joined along `dim`: fused q/k/v, gate/up."""

    parts: tuple[Source, ...]
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Stack(Source):
    """One part per value of the name field `over`, stacked in a new leading axis: experts."""

    part: Source
    over: str
    axis: Axis


@dataclass(frozen=True, slots=True)
class Split(Source):
    """Rows [start, start + size) of `part` along `dim`: a fused checkpoint tensor that makes several parameters."""

    part: Source
    start: int
    size: int
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Permute(Source):
    """Axes of `part` in another order (a transpose is the order (1, 0))."""

    part: Source
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Interleave(Source):
    """`dim` of size n * groups, stored as `groups` runs, becomes n runs of `groups`: (g, n) -> (n, g)."""

    part: Source
    groups: int
    dim: int = 0


@dataclass(frozen=True, slots=True)
class Reshape(Source):
    """The same elements in row-major order under another shape (per-head reshape, squeezed axes)."""

    part: Source
    dims: tuple[Dim, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter or buffer of the module tree, and what it is made of."""

    parameter: str
    source: Source
    over: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Name field -> the values for which this descriptor holds, e.g. `{"layer": range(28)}`."""
    dtype: str = "model"
    """"model" (the engine's dtype), or a pinned dtype such as "float32"."""


@dataclass(frozen=True, slots=True)
class Tie:
    """`parameter` shares the storage of `to`; its own tensor may be absent from the checkpoint."""

    parameter: str
    to: str


@dataclass(frozen=True, slots=True)
class Skip:
    """Checkpoint tensors that are left out on purpose; `pattern`, a regular expression, must match the whole name."""

    pattern: str
    reason: str


Descriptor = Weight | Tie | Skip


@dataclass(frozen=True, slots=True)
class Layout:
    """One named form in which checkpoints of this model exist in the wild."""

    name: str
    descriptors: tuple[Descriptor, ...]


class WeightDescriptors:
    """All layouts of a model; the one whose audit is clean against a checkpoint's headers is taken."""

    def __init__(self, *descriptors: Descriptor, name: str = "hub", others: Sequence[Layout] = ()) -> None:
        self.layouts: tuple[Layout, ...] = (Layout(name, descriptors), *others)
