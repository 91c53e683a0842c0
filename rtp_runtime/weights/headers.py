"""What the safetensors files of a checkpoint say of their tensors, read without their data and never trusted.

Nothing but safetensors is ever opened, and a name found in a file never becomes a path.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtp_runtime.errors import CheckpointError
from rtp_runtime.weights.dtypes import BITS, CODES

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library too."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of a checkpoint: where its bytes lie, and what they mean."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    """Absolute offset of its first byte in the file."""
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def describe(self) -> str:
        return f"{self.dtype} {list(self.shape)} in {self.file.name}"


@dataclass(frozen=True, slots=True)
class FileHeader:
    """One safetensors file."""

    path: Path
    tensors: tuple[TensorHeader, ...]
    metadata: Mapping[str, str]
    digest: str
    """SHA-256 of its header."""
    data_end: int
    """Where its last tensor ends."""
    size: int
    """Bytes that the file really has."""

    @property
    def truncated(self) -> bool:
        return self.size < self.data_end


@dataclass(frozen=True, slots=True)
class Headers:
    """All tensors of a checkpoint by name, and the files they lie in."""

    directory: Path
    files: tuple[FileHeader, ...]
    tensors: Mapping[str, TensorHeader]
    notes: tuple[str, ...] = field(default=())

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def where(self) -> str:
        """The files in words, for messages about a tensor that none of them holds."""
        names = [file.path.name for file in self.files]
        listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        return listed if len(names) == 1 else f"any of {len(names)} files ({listed})"

    def fingerprint(self) -> str:
        """SHA-256 over all headers."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.path.name} {file.digest}\n".encode())
        return digest.hexdigest()

    def require_data(self) -> None:
        """Raises CheckpointError when a file ends before its tensors do."""
        for file in self.files:
            if not file.truncated:
                continue
            cut = next(tensor for tensor in file.tensors if tensor.stop > file.size)
            raise CheckpointError(
                f"{file.path}: truncated. {cut.name} needs bytes {cut.start} to {cut.stop}, the file has {file.size} "
                f"of {file.data_end}. Copy or download this file again."
            )


def read_headers(directory: Path) -> Headers:
    """Headers of the checkpoint in `directory`: one file, shards with an index, or shards without.

    Files whose data is missing are allowed here (`Headers.require_data` is not). Raises CheckpointError for anything
    else that is wrong with a file, its header or the index.
    """
    index = _read_index(directory / INDEX) if (directory / INDEX).exists() else None
    if (directory / SINGLE).exists() and index is not None and SINGLE not in index.values():
        index = None  # transformers too takes the single file, and the index is left from another save
    paths, ignored = _choose_files(directory, index)
    files = tuple(read_file_header(path) for path in paths)
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        for tensor in file.tensors:
            _refuse_twice(tensor, tensors)
            tensors[tensor.name] = tensor
    if index is not None:
        _compare_with_index(index, tensors, directory / INDEX)
    notes = tuple(f"{path.name} is not part of the checkpoint and was left out" for path in ignored)
    for path in ignored:
        if path.name.startswith("model-"):
            for tensor in read_file_header(path).tensors:
                _refuse_twice(tensor, tensors)
    return Headers(directory, files, tensors, notes)


def read_file_header(path: Path) -> FileHeader:
    """The header of one safetensors file. Raises CheckpointError when it is not a sound one."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: is not a file.")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
                raise _corrupt(path, f"its header should be {length} bytes long, the file has {size}")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from error
    entries = _parse(raw, path)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _corrupt(path, "__metadata__ is not an object")
    tensors = sorted(
        (_tensor(name, entry, path, 8 + length) for name, entry in entries.items()),
        key=lambda tensor: (tensor.start, tensor.stop),
    )
    end = _check_offsets(tensors, path, 8 + length)
    if size > end:
        raise _corrupt(path, f"{size - end} bytes follow the last tensor")
    return FileHeader(path, tuple(tensors), metadata, hashlib.sha256(raw).hexdigest(), end, size)


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise _corrupt(path, f"{twice!r} stands twice in it")
        return entries

    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"it is not JSON ({error})") from error
    if not isinstance(entries, dict):
        raise _corrupt(path, "it is not a JSON object")
    return entries


def _tensor(name: str, entry: Any, path: Path, base: int) -> TensorHeader:
    try:
        code, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise _corrupt(path, f"{name!r} lacks dtype, shape or data_offsets") from error
    if not isinstance(code, str) or code not in CODES:
        raise _corrupt(path, f"{name!r} has the dtype {code!r}; known are {', '.join(CODES)}")
    numbers = [*shape, start, stop] if isinstance(shape, list) else [None]
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
        raise _corrupt(path, f"{name!r} has the shape {shape!r} and the offsets {[start, stop]!r}")
    dtype = CODES[code]
    expected = math.prod(shape) * BITS[dtype] // 8
    if stop - start != expected:
        raise _corrupt(path, f"{name!r} ({code} {shape}) needs {expected} bytes, its offsets give {stop - start}")
    return TensorHeader(name, dtype, tuple(shape), path, base + start, base + stop)


def _check_offsets(tensors: list[TensorHeader], path: Path, base: int) -> int:
    end = base
    for before, tensor in zip([None, *tensors], tensors, strict=False):
        if tensor.start != end:
            what = "overlaps" if tensor.start < end else "leaves a gap after"
            other = before.name if before is not None else "the header"
            raise _corrupt(path, f"{tensor.name!r} at byte {tensor.start} {what} {other!r}, which ends at {end}")
        end = tensor.stop
    return end


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise _not_an_index(path) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise _not_an_index(path)
    for tensor, file in weight_map.items():
        if not _is_plain_file_name(file):
            raise CheckpointError(
                f"{path}: {tensor!r} is said to lie in {file!r}. A shard is a .safetensors file beside the index."
            )
    return weight_map


def _not_an_index(path: Path) -> CheckpointError:
    return CheckpointError(
        f'{path}: not an index of shards, which holds {{"weight_map": {{name: file, …}}}}. Download it again.'
    )


def _is_plain_file_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not name.startswith(".")
        and not any(character in name for character in "/\\\0:")
    )


def _choose_files(directory: Path, index: Mapping[str, str] | None) -> tuple[list[Path], list[Path]]:
    """The files of the checkpoint, in transformers' order of preference, and the safetensors files beside them."""
    present = sorted(path for path in directory.glob("*.safetensors") if path.is_file())
    if index is not None:
        chosen = [directory / name for name in sorted(set(index.values()))]
        for path in chosen:
            if not path.is_file():
                tensor = next(tensor for tensor, name in index.items() if name == path.name)
                raise CheckpointError(
                    f"{directory / INDEX}: names the shard {path.name}, which is missing (it holds {tensor!r} and "
                    f"{sum(name == path.name for name in index.values()) - 1} more). Copy or download it too."
                )
    else:
        chosen = [directory / SINGLE] if (directory / SINGLE).exists() else present
    if not chosen:
        raise _no_safetensors(directory)
    return chosen, [path for path in present if path not in chosen]


def _no_safetensors(directory: Path) -> CheckpointError:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in directory.glob(pattern))
    gguf = sorted(path.name for path in directory.glob("*.gguf"))
    convert = (
        "AutoModelForCausalLM.from_pretrained(…).save_pretrained(DIRECTORY) of transformers, "
        "run where you trust the file, writes safetensors."
    )
    if pickles:
        return CheckpointError(
            f"{directory}: holds {pickles[0]}, a pickle, and no safetensors. Reading a pickle can run any program, so "
            f"rtp does not. {convert}"
        )
    if gguf:
        return CheckpointError(f"{directory}: holds {gguf[0]} and no safetensors; rtp does not read GGUF. {convert}")
    return CheckpointError(f"{directory}: holds no .safetensors file. Copy or download the weights into it.")


def _refuse_twice(tensor: TensorHeader, tensors: Mapping[str, TensorHeader]) -> None:
    if tensor.name in tensors:
        other = tensors[tensor.name]
        raise CheckpointError(
            f"{tensor.name!r} stands twice: in {other.file.name} and in {tensor.file.name} of {tensor.file.parent}. "
            "Only its author can say which one counts; remove the other file or tensor."
        )


def _compare_with_index(index: Mapping[str, str], tensors: Mapping[str, TensorHeader], path: Path) -> None:
    for name, file in index.items():
        found = tensors.get(name)
        if found is None:
            raise CheckpointError(
                f"{path}: {name!r} should lie in {file}, but no shard holds it. Download {file} again."
            )
        if found.file.name != file:
            raise CheckpointError(f"{path}: {name!r} should lie in {file}, but lies in {found.file.name}.")


def _corrupt(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: corrupt header: {problem}. Copy or download this file again.")
