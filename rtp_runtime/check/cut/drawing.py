"""Writes a checkpoint of random weights for a config, tensor by tensor, drawn so that faults show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rtp_runtime.check.cut.outline import Outline
from rtp_runtime.check.cut.stored import as_stored, groups, held
from rtp_runtime.check.cut.writing import Entry, SafetensorsFile
from rtp_runtime.check.streaming import skeleton
from rtp_runtime.testing.tiny_models import draw_buffer, draw_parameter
from rtp_runtime.weights.dtypes import torch_dtype

PERIOD = 4_194_301
"""Elements drawn of one matrix; a larger one repeats them. A prime, so that no two rows begin at the same place."""
NARROW_FROM = 20_000_000
"""Parameters from which a checkpoint is written in the config's dtype; smaller ones are written in float32."""


def write_random(path: Path, outline: Outline, dtype: str, seed: int, say: Callable[[str], None]) -> int:
    """Write a safetensors file with random weights for the model of `outline`; its size in bytes.

    Args:
        path: the file.
        outline: the model on the meta device.
        dtype: of matrices; vectors (norms, biases of routers) stay in float32, so that rounding them would show.
        seed: of the draws.
        say: told what is being written.

    Raises:
        UsageError: the disk has no room.
    """
    config = outline.config
    model = skeleton(type(outline.model), config)
    tensors = held(model)
    generator = torch.Generator().manual_seed(seed)
    parts = list(groups(list(tensors), outline.layers, {name: tensor.numel() for name, tensor in tensors.items()}))
    narrow = torch_dtype(dtype if sum(tensor.numel() for tensor in tensors.values()) >= NARROW_FROM else "float32")
    dtypes = {
        name: narrow if tensor.ndim > 1 and tensor.is_floating_point() else tensor.dtype
        for name, tensor in tensors.items()
    }
    entries: dict[str, Entry] = {}
    for part in parts:
        outlines = {name: torch.empty(tensors[name].shape, dtype=dtypes[name], device="meta") for name in part}
        for name, tensor in as_stored(model, outlines).items():
            entries[name] = Entry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    with SafetensorsFile(path, entries) as file:
        for place, part in enumerate(parts):
            say(f"drawing weights: part {place + 1} of {len(parts)}")
            drawn = {name: _draw(name, tensors[name], dtypes[name], generator, config) for name in part}
            for name, tensor in as_stored(model, drawn).items():
                file.write(name, tensor)
    return file.num_bytes


def _draw(name: str, tensor: Tensor, dtype: torch.dtype, generator: torch.Generator, config: Any) -> Tensor:
    """The value of one parameter or buffer, as `randomise` draws it."""
    if not isinstance(tensor, torch.nn.Parameter):
        return draw_buffer(name, tensor, generator, config).to(dtype)
    if tensor.ndim < 2:
        return draw_parameter(name, tensor.detach(), generator).to(dtype)
    row = max(1, tensor[0].numel()) if len(tensor) else 1
    few = min(len(tensor), -(-PERIOD // row))
    drawn = draw_parameter(name, torch.empty((few, *tensor.shape[1:]), device="meta"), generator).to(dtype)
    return drawn if few == len(tensor) else _repeated(drawn.flatten()[:PERIOD], tensor.shape)


def _repeated(values: Tensor, shape: torch.Size) -> Tensor:
    """`values` over and over, as a tensor of this shape: drawing each element would take longer than the check."""
    out = torch.empty(shape, dtype=values.dtype)
    flat = out.view(-1)
    whole = len(flat) // len(values) * len(values)
    flat[:whole].view(-1, len(values)).copy_(values)
    flat[whole:].copy_(values[: len(flat) - whole])
    return out
