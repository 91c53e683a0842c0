"""Writes the part of a real checkpoint that a cut model holds: some layers under new numbers, the first experts.

Rows and layers are ranges of bytes, which are copied as they are; only tables of expert ids are computed anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rtp_runtime.check.cut.outline import Outline
from rtp_runtime.check.cut.stored import held, stored_shapes
from rtp_runtime.check.cut.writing import Entry, SafetensorsFile
from rtp_runtime.check.streaming import skeleton
from rtp_runtime.check.streaming.stored import read_bytes
from rtp_runtime.errors import CheckpointError
from rtp_runtime.weights.dtypes import torch_dtype
from rtp_runtime.weights.headers import TensorHeader, read_headers


@dataclass(frozen=True)
class Kept:
    """What stays of a model."""

    layers: tuple[int, ...]
    """Indices of the layers, in order."""
    num_layers: int
    """Of the whole model."""
    experts: int
    """Routed experts of a layer; 0 where there are none."""
    num_experts: int
    """Of the whole model."""


@dataclass(frozen=True)
class Part:
    """One tensor of the cut checkpoint and where it comes from."""

    name: str
    header: TensorHeader
    shape: tuple[int, ...]
    rows: tuple[tuple[int, int], ...] | None = None
    """Rows of the first axis; None: computed from the whole tensor, a table of expert ids."""


def write_cut(path: Path, source: Path, outline: Outline, kept: Kept, say: Callable[[str], None]) -> int:
    """Write the tensors of the checkpoint in `source` that the cut model of `outline` holds; the file's size in bytes.

    Raises:
        CheckpointError: the checkpoint's layers or a tensor's shape are not what its config says.
        UsageError: the disk has no room.
    """
    parts = cut_parts(source, outline, kept)
    entries = {part.name: Entry(part.header.dtype, part.shape) for part in parts}
    tables = _tables(outline)
    with SafetensorsFile(path, entries) as file:
        for place, part in enumerate(parts):
            if place % 50 == 0:
                say(f"copying tensors: {place} of {len(parts)}")
            table = tables.get(part.name)
            if table is not None and tuple(table.shape) == part.shape:
                file.write(part.name, table.to(torch_dtype(part.header.dtype)))
            else:
                _write(file, part, kept)
    return file.num_bytes


def _tables(outline: Outline) -> dict[str, Tensor]:
    """Tables that a checkpoint holds although the config says them, as decays by a layer's place: of the cut model."""
    stored = held(outline.model)
    model = skeleton(type(outline.model), outline.config)
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in stored and buffer.ndim > 1 and buffer.is_floating_point() and not buffer.is_meta
    }


def cut_parts(source: Path, outline: Outline, kept: Kept) -> list[Part]:
    """The tensors of the cut checkpoint, by the names and headers of the whole one. Raises CheckpointError."""
    headers = read_headers(source)
    headers.require_data()
    prefix = _layers_prefix(source, list(headers.tensors), outline, kept.num_layers)
    shapes = {name: tuple(tensor.shape) for name, tensor in held(outline.model).items()}
    shapes |= stored_shapes(outline.model, outline.layers)
    lists = _numbered_lists(headers.tensors, prefix)
    parts = []
    for name, header in headers.tensors.items():
        new = _new_name(name, prefix, kept, lists)
        if new is not None:
            parts.append(_part(new, header, shapes.get(new, header.shape), kept, new.startswith(f"{prefix}.")))
    return parts


def cut_ids(table: Tensor, num_experts: int, columns: int) -> Tensor:
    """Expert ids [rows, ids] among the first experts: each id modulo their number, the next one where that is taken."""
    ids = table[:, :columns] % num_experts
    for column in range(1, columns):
        while bool((taken := (ids[:, :column] == ids[:, column : column + 1]).any(dim=1)).any()):
            ids[taken, column] = (ids[taken, column] + 1) % num_experts
    return ids


def _layers_prefix(source: Path, names: Sequence[str], outline: Outline, num_layers: int) -> str:
    """What stands before the number of a decoder layer in the names of the checkpoint's tensors."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        pieces = name.split(".")
        place = next((place for place, piece in enumerate(pieces) if piece.isdecimal()), None)
        if place is not None:
            numbers[".".join(pieces[:place])].add(int(pieces[place]))
    known = outline.layers[0].split(".")[:-1]
    fits = [prefix for prefix, found in numbers.items() if found.issuperset(range(num_layers))]
    if not fits:
        raise CheckpointError(f"{source}: no tensors are numbered as {num_layers} layers would be.")
    return max(fits, key=lambda prefix: (prefix == ".".join(known), len(set(prefix.split(".")) & set(known))))


def _numbered_lists(names: Mapping[str, TensorHeader], prefix: str) -> dict[str, int]:
    """Prefix inside the layers, with its layer -> how many numbered modules follow it."""
    found: dict[str, set[int]] = defaultdict(set)
    for name in names:
        if name.startswith(f"{prefix}."):
            pieces = name[len(prefix) + 1 :].split(".")
            place = next((place for place, piece in enumerate(pieces[1:], 1) if piece.isdecimal()), None)
            if place is not None:
                found[".".join(pieces[:place])].add(int(pieces[place]))
    return {key: max(numbers) + 1 for key, numbers in found.items()}


def _new_name(name: str, prefix: str, kept: Kept, lists: Mapping[str, int]) -> str | None:
    """The tensor's name in the cut checkpoint; None where it is left out."""
    if not name.startswith(f"{prefix}."):
        return name
    pieces = name[len(prefix) + 1 :].split(".")
    if not pieces[0].isdecimal():
        return name
    if int(pieces[0]) not in kept.layers:
        return None
    place = next((place for place, piece in enumerate(pieces[1:], 1) if piece.isdecimal()), None)
    of_experts = place is not None and kept.experts < kept.num_experts == lists[".".join(pieces[:place])]
    if place is not None and of_experts and int(pieces[place]) >= kept.experts:
        return None
    return ".".join([prefix, str(kept.layers.index(int(pieces[0]))), *pieces[1:]])


def _part(name: str, header: TensorHeader, wanted: tuple[int, ...], kept: Kept, in_layer: bool) -> Part:
    shape = header.shape
    gone = kept.num_experts - kept.experts
    holds_ids = in_layer and len(shape) == 2 and not torch_dtype(header.dtype).is_floating_point
    if not holds_ids or not gone:
        if shape == wanted:
            return Part(name, header, shape, ((0, shape[0] if shape else 1),))
        if gone and shape and wanted == (shape[0] - gone, *shape[1:]):
            return Part(name, header, wanted, ((0, kept.experts), (kept.num_experts, shape[0])))
    elif shape[:1] == wanted[:1] and shape[1] >= wanted[1]:
        return Part(name, header, wanted, None)
    raise CheckpointError(
        f"{header.file.name}: {header.name} is {list(shape)}, of which a model with the layers and experts that are "
        f"kept should hold {list(wanted)}: the config and this checkpoint do not belong together."
    )


def _write(file: SafetensorsFile, part: Part, kept: Kept) -> None:
    header = part.header
    if part.rows is None:
        data = (
            read_bytes(header.file, header.start, header.num_bytes).view(torch_dtype(header.dtype)).view(header.shape)
        )
        file.write(part.name, cut_ids(data, kept.experts, part.shape[1]))
        return
    row = header.num_bytes // max(1, header.shape[0]) if header.shape else header.num_bytes
    done = 0
    for first, last in part.rows:
        file.copy(part.name, header.file, header.start + first * row, (last - first) * row, done)
        done += (last - first) * row
