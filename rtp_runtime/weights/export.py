"""Writes a loaded model's weights back as the checkpoint they came from: same names, dtypes, files and bytes.

Writes safetensors, only in the chosen directory, and never over a file that is there.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rtp_runtime.errors import UsageError
from rtp_runtime.weights.dtypes import code, keeps_values, torch_dtype
from rtp_runtime.weights.headers import INDEX, FileHeader, TensorHeader
from rtp_runtime.weights.loaded import LoadedWeights
from rtp_runtime.weights.operations import Slice, invert, leaves

ReadParameter = Callable[[str], Tensor]
"""Parameter name -> its logical value."""

MAX_CACHED = 4
"""Parameters whose slices are kept at hand: neighbours in a file go back and forth between a few."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written."""

    files: tuple[Path, ...]
    lossy: tuple[str, ...]
    """Tensors whose values had been rounded when they were loaded into a narrower dtype."""


def export_weights(
    read: ReadParameter, weights: LoadedWeights, model_dtype: str, directory: str | Path
) -> ExportReport:
    """Write every tensor of the loaded layout that is not skipped into `directory`, file by file as it was.

    Nothing is left behind when it fails. Raises UsageError when a file of that name is there already.
    """
    directory = Path(directory)
    files = [(file, _kept(file, weights)) for file in weights.headers.files]
    files = [(file, tensors) for file, tensors in files if tensors]
    names = [file.path.name for file, _ in files] + ([INDEX] if len(files) > 1 else [])
    _refuse_existing(directory, names)
    directory.mkdir(parents=True, exist_ok=True)
    assemble = _Assembler(read, weights)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=directory) as scratch:
        for file, tensors in files:
            _write_file(Path(scratch) / file.path.name, tensors, file.metadata, assemble)
        if len(files) > 1:
            _write_index(Path(scratch) / INDEX, files)
        _refuse_existing(directory, names)
        for name in names:
            os.rename(Path(scratch) / name, directory / name)
    return ExportReport(tuple(directory / name for name in names), tuple(_lossy(weights, model_dtype)))


class _Assembler:
    """Makes checkpoint tensors out of parameters, one at a time."""

    def __init__(self, read: ReadParameter, weights: LoadedWeights) -> None:
        self._read = read
        self._weights = weights
        self._cache: OrderedDict[str, dict[str, list[tuple[Slice, Tensor]]]] = OrderedDict()
        self._users: dict[str, list[str]] = {}
        for parameter in weights.layout.parameters:
            for name in dict.fromkeys(leaf.name for leaf in leaves(parameter.source)):
                self._users.setdefault(name, []).append(parameter.name)

    def __call__(self, header: TensorHeader) -> Tensor:
        """The tensor in its own dtype, on the CPU."""
        name = header.name
        if name in self._weights.audit.tied:
            return self._read(self._weights.audit.tied[name]).to("cpu", torch_dtype(header.dtype))
        made = torch.empty(header.shape, dtype=torch_dtype(header.dtype))
        for user in self._users[name]:
            for part, view in self._slices(user)[name]:
                made[tuple(slice(*bounds) for bounds in part.region)] = view.to(made.dtype)
        return made

    def _slices(self, parameter: str) -> dict[str, list[tuple[Slice, Tensor]]]:
        if parameter not in self._cache:
            slices: dict[str, list[tuple[Slice, Tensor]]] = {}
            for leaf, view in invert(self._weights.parameter(parameter).source, self._read(parameter)):
                slices.setdefault(leaf.name, []).append((leaf, view))
            self._cache[parameter] = slices
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(parameter)
        return self._cache[parameter]


def _kept(file: FileHeader, weights: LoadedWeights) -> list[TensorHeader]:
    return [tensor for tensor in file.tensors if tensor.name not in weights.audit.skipped]


def _lossy(weights: LoadedWeights, model_dtype: str) -> list[str]:
    held = {parameter.name: parameter.dtype_in(model_dtype) for parameter in weights.layout.parameters}
    uses = [(leaf.name, parameter.name) for parameter in weights.layout.parameters for leaf in leaves(parameter.source)]
    uses += weights.audit.tied.items()
    dtypes = {name: header.dtype for name, header in weights.headers.tensors.items()}
    return list(dict.fromkeys(name for name, parameter in uses if not keeps_values(dtypes[name], held[parameter])))


def _write_file(
    path: Path, tensors: Iterable[TensorHeader], metadata: object, assemble: Callable[[TensorHeader], Tensor]
) -> None:
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    tensors = list(tensors)
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {"dtype": code(tensor.dtype), "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("xb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors:
            made = assemble(tensor).contiguous()
            assert made.nbytes == tensor.num_bytes, tensor.name
            if math.prod(tensor.shape):
                file.write(made.view(-1).view(torch.uint8).numpy().data)


def _write_index(path: Path, files: list[tuple[FileHeader, list[TensorHeader]]]) -> None:
    weight_map = {tensor.name: file.path.name for file, tensors in files for tensor in tensors}
    total = sum(tensor.num_bytes for _, tensors in files for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _refuse_existing(directory: Path, names: Iterable[str]) -> None:
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory}: is a file. Give a directory to export into.")
    for name in names:
        if os.path.lexists(directory / name):
            raise UsageError(f"{directory / name}: is there already. Export into another directory.")
