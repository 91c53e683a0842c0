"""Which tensors of a checkpoint a parameter of a transformers model is made of, by transformers' own mapping.

transformers renames, fuses and splits while it loads. Here the same mapping is applied to one parameter at a time.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rtp_runtime.check.streaming.stored import StoredTensors, widened
from rtp_runtime.errors import CheckpointError, NotJudgedError
from rtp_runtime.weights.dtypes import torch_dtype

MOVES = frozenset({"MergeModulelist", "Concatenate", "Chunk", "SplitModulelist", "Transpose"})
"""transformers' operations that leave every value as it is."""


@dataclass(slots=True)
class Source:
    """One conversion: its tensors in order, and the parameters that it makes."""

    transform: Any
    first: str
    """The first parameter that it makes, by which transformers names the conversion."""
    parts: list[tuple[str, str]] = field(default_factory=list)
    """(tensor of the checkpoint, the pattern that it matched)."""

    @property
    def plain(self) -> str | None:
        """The tensor's name where the parameter is that tensor as it is."""
        return None if hasattr(self.transform, "operations") else self.parts[0][0]

    @property
    def only_moves(self) -> bool:
        """Whether values are moved and none is computed, so that they may be widened afterwards."""
        return all(type(operation).__name__ in MOVES for operation in getattr(self.transform, "operations", ()))


class Sources:
    """The parameters and stored buffers of `model` (on the meta device or not), made from `stored` when asked for."""

    def __init__(self, model: Any, stored: StoredTensors) -> None:
        self._model = model
        self.stored = stored
        self.unexpected: set[str] = set()
        self._of: dict[str, Source] = {}
        self._wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._given: dict[str, tuple[int, ...]] = {}
        """Parameter -> the shape that the checkpoint's tensors give."""
        self._collect()

    @property
    def missing(self) -> list[str]:
        """Parameters and stored buffers for which the checkpoint has nothing."""
        return sorted(name for name in self._wanted if name not in self._of)

    @property
    def mismatched(self) -> list[str]:
        """Those for which it has another shape than the config says."""
        return sorted(name for name, shape in self._given.items() if self._wanted.get(name, shape) != shape)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has what the parameter is made of."""
        return name in self._of

    def size(self, name: str) -> int:
        """Bytes of the parameter in float32."""
        return 4 * int(math.prod(self._wanted[name]))

    def plain(self, name: str) -> str | None:
        """The tensor that this parameter is, where nothing is converted."""
        return self._of[name].plain if name in self._of else None

    def make(self, name: str) -> Tensor:
        """The parameter's value, floats in float32.

        Raises CheckpointError when its tensors do not give its shape.
        """
        source = self._of[name]
        if source.plain:
            value = self.stored.read(source.plain)
        elif source.only_moves:
            value = widened(self._convert(source, self.stored.read_as_stored)[name])
        else:
            value = self._convert(source, self.stored.read)[name]
        if tuple(value.shape) != self._wanted[name]:
            wanted = list(self._wanted[name])
            raise CheckpointError(f"{name}: the checkpoint gives {list(value.shape)}, the config says {wanted}.")
        return value

    def _convert(self, source: Source, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        transform = copy.deepcopy(source.transform)
        for tensor, pattern in source.parts:
            transform.add_tensor(source.first, tensor, pattern, functools.partial(read, tensor))
        made = transform.convert(source.first, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _outline(self, tensor: str) -> Tensor:
        header = self.stored.headers[tensor]
        return torch.empty(header.shape, dtype=torch_dtype(header.dtype), device="meta")

    def _collect(self) -> None:
        loading = _loading()
        mapping = loading.mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, loading.renaming)]
        converters: list[Any] = [entry for entry in mapping if isinstance(entry, loading.converter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        known, prefix = self._model.state_dict(), self._model.base_model_prefix
        for tensor in sorted(self.stored.headers, key=loading.order):
            name, pattern = loading.rename(tensor, renamings, converters, prefix, known)
            if name not in known and tensor in known:
                name, pattern = tensor, None
            if name not in known:
                self.unexpected.add(tensor)
                continue
            if name not in self._of:
                made = copy.deepcopy(by_pattern[pattern]) if pattern else loading.renaming(tensor, name)
                self._of[name] = Source(made, name)
            self._of[name].parts.append((tensor, pattern or tensor))
        for source in list(self._of.values()):
            for name, value in self._convert(source, self._outline).items():
                self._of[name] = source
                self._given[name] = tuple(value.shape)


@dataclass(frozen=True, slots=True)
class _Loading:
    """The parts of transformers' loader that are used here."""

    mapping: Callable[[Any], list[Any]]
    renaming: type
    converter: type
    rename: Callable[..., tuple[str, str | None]]
    order: Callable[[str], Any]


def _loading() -> _Loading:
    import transformers

    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError as error:
        raise NotJudgedError(
            f"transformers {transformers.__version__} loads weights otherwise than its version 5.24, so its model "
            "cannot be streamed: install that version, or check on a machine that holds both models"
        ) from error
    return _Loading(get_model_conversion_mapping, WeightRenaming, WeightConverter, rename_source_key, dot_natural_key)
