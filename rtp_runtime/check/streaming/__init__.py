"""A reference whose weights stay in their files: its modules read them in float32 when they compute.

What a whole model would take several times over is then a fraction of it: small parameters, and what is in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rtp_runtime.check.loading import eager
from rtp_runtime.check.reference import Defect, Reference
from rtp_runtime.check.streaming.lazy import Pool, make_lazy, multiply_in_blocks, read_rows_only
from rtp_runtime.check.streaming.sources import Sources
from rtp_runtime.check.streaming.stored import StoredTensors
from rtp_runtime.errors import CheckpointError

__all__ = ["BLOCK_BYTES", "POOL_BYTES", "SMALL", "StreamedReference", "skeleton", "stream_model"]

SMALL = 1 << 20
"""Parameters with fewer elements are kept."""
POOL_BYTES = 2 << 30
BLOCK_BYTES = 4 << 20
"""A linear layer or an embedding with a larger matrix reads it in parts, and keeps nothing of it."""
PART_BYTES = 16 << 20
"""Rows of a matrix that are read and multiplied at once: few enough that the memory is had again without asking."""


class StreamedReference(Reference):
    """A reference that reads its large parameters when they are asked for."""

    def __init__(self, path: Path, model: nn.Module, pool: Pool, defects: list[Defect]) -> None:
        self.pool = pool
        super().__init__(path, model, defects, frozenset(pool.sources.unexpected))

    @property
    def is_outline(self) -> bool:
        return False

    @property
    def is_streamed(self) -> bool:
        return True

    @property
    def used(self) -> frozenset[str]:
        if "asked" not in self.known:
            self.pool.asked.clear()
            _ = super().used  # runs the model
            self.known["asked"] = self._with_aliases(self.pool.asked)
        return super().used | {self.naming.ours_of(name) or name for name in self.known["asked"]}

    def _with_aliases(self, names: set[str]) -> frozenset[str]:
        """These names, and the others that tied parameters have."""
        every = list(self.model.named_parameters(remove_duplicate=False))
        asked = {id(parameter) for name, parameter in every if name in names}
        return frozenset(names | {name for name, parameter in every if id(parameter) in asked})


def stream_model(
    path: Path, model_class: Any, config: Any, capacity: int = POOL_BYTES, small: int = SMALL, block: int = BLOCK_BYTES
) -> tuple[Any, Pool, list[str]]:
    """The model of `config` over the checkpoint in `path`, and the names for which the checkpoint has nothing.

    Raises:
        NotJudgedError: this transformers' loader is not known.
        CheckpointError: the checkpoint cannot be read, or a kept tensor has another shape than the config says.
    """
    model = skeleton(model_class, config, small)
    sources = Sources(model, StoredTensors(path))
    if sources.mismatched:
        raise CheckpointError(f"{path}: {sources.mismatched[0]} has another shape than the config says.")
    pool = Pool(sources, capacity)
    everything = list(model.named_parameters(remove_duplicate=False))
    names = {id(parameter): name for name, parameter in everything if parameter.is_meta and sources.has(name)}
    made = {id(parameter) for name, parameter in everything if sources.has(name)}
    tied = {name for name, parameter in everything if id(parameter) in made}
    missing = [name for name in sources.missing if name not in tied]
    _fill_kept(model, sources)
    make_lazy(model, names, pool)
    for module in model.modules():
        _read_in_parts(module, names, pool, block)
    return model.eval().requires_grad_(False), pool, missing


def skeleton(model_class: Any, config: Any, small: int = SMALL) -> Any:
    """The model with its tables, and its parameters of fewer than `small` elements as transformers begins with them.

    The others are on the meta device.
    """
    with _large_on_meta(small):
        return model_class._from_config(config, dtype=torch.float32, **eager(model_class))


@contextmanager
def _large_on_meta(small: int) -> Iterator[None]:
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        convolution = isinstance(self, nn.modules.conv._ConvNd)  # whose weight may go to a function, seen by its memory
        if param is not None and not param.is_meta and param.numel() >= small and not convolution:
            self._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=False)

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@torch.no_grad()
def _fill_kept(model: Any, sources: Sources) -> None:
    for name, tensor in model.state_dict().items():
        if not tensor.is_meta and sources.has(name):
            tensor.copy_(sources.make(name))


def _read_in_parts(module: nn.Module, names: dict[int, str], pool: Pool, block: int) -> None:
    weight = module._parameters.get("weight")
    name = names.get(id(weight))
    if weight is None or name is None or weight.numel() * 4 < block:
        return
    tensor = pool.sources.plain(name)
    if tensor is None:
        return
    plain = type(module).forward
    if isinstance(module, nn.Embedding) and plain is nn.Embedding.forward:
        read_rows_only(module, tensor, pool, name)
    elif isinstance(module, nn.Linear) and plain is nn.Linear.forward:
        multiply_in_blocks(module, tensor, pool, name, max(1, PART_BYTES // (4 * module.in_features)))
