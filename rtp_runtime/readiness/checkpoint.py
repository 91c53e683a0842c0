"""Digests of a checkpoint: its config, every byte of its weights, its tokenizer files.

Weights are hashed whole, since a change of one tensor leaves headers and sizes alone. That takes as long as reading
them once, so digests are kept beside the evidence, by size, times and inode of the file: what was not touched is not
read again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtp_runtime.errors import CheckpointError
from rtp_runtime.readiness.content import Content
from rtp_runtime.readiness.record import ModelIdentity
from rtp_runtime.readiness.store import write_atomically

Progress = Callable[[str], None]
"""Called with a line of words as work goes on."""

CHUNK = 16 * 2**20
WORTH_KEEPING = 2**20
"""Bytes of a file whose digest is kept; a smaller one is read faster than it is looked up."""
TEXT_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A checkpoint's identity and the files behind its digests."""

    identity: ModelIdentity
    parts: Mapping[str, Content]
    """"config", "weights" and "text"."""


class HashCache:
    """SHA-256 of large files by where they lie, their size, times and inode; in a directory of this machine's own."""

    def __init__(self, directory: Path | None) -> None:
        self._file = None if directory is None else directory / "hashes.json"
        self._known: dict[str, list[Any]] = {}
        if self._file is not None and self._file.is_file():
            try:
                found = json.loads(self._file.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError):
                found = None  # what it held is computed again
            self._known = found if isinstance(found, dict) else {}

    def digest(self, path: Path, progress: Progress | None = None) -> str:
        """The file's SHA-256, read only if the file was touched since.

        Raises:
            CheckpointError: a file that cannot be read.
        """
        key = str(path.resolve())
        try:
            stat = path.stat()
            stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            known = self._known.get(key)
            if isinstance(known, list) and len(known) == 5 and known[:4] == stamp and isinstance(known[4], str):
                return known[4]
            digest = _hash(path, stat.st_size, progress)
            if stat.st_size < WORTH_KEEPING:
                return digest
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from error
        self._known[key] = [*stamp, digest]
        self._save()
        return digest

    def _save(self) -> None:
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            ignore = self._file.parent / ".gitignore"
            if not ignore.exists():
                write_atomically(ignore, "*\n")
            write_atomically(self._file, json.dumps(self._known, indent=0, sort_keys=True) + "\n")
        except OSError:
            self._file = None  # a directory that cannot be written costs time, nothing else


def fingerprint(
    config: Path,
    weights: Sequence[Path],
    given: str,
    architecture: str,
    cache: HashCache,
    progress: Progress | None = None,
) -> Fingerprint:
    """The identity of the checkpoint with this config and these files of weights, that was named as `given`.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    parts = {
        "config": _content([config], cache, None),
        "weights": _content(weights, cache, progress),
        "text": _content(_text_files(config.parent), cache, None),
    }
    digests = {name: content.digest if content.files else "" for name, content in parts.items()}
    name = model_name(given, config.parent)
    identity = ModelIdentity(name=name, given=given, architecture=architecture, **digests)
    return Fingerprint(identity, parts)


def model_name(given: str, directory: Path) -> str:
    """A hub id without its revision, or the directory's own name."""
    return directory.resolve().name if Path(given).expanduser().exists() else given.partition("@")[0]


def weight_files(directory: Path) -> list[Path]:
    """The files that make up the weights: those the headers name, or all there are where these cannot be read."""
    from rtp_runtime.weights.headers import read_headers

    try:
        return [file.path for file in read_headers(directory).files]
    except CheckpointError:
        return sorted(path for path in directory.glob("*.safetensors") if path.is_file())


def _text_files(directory: Path) -> list[Path]:
    named = [directory / name for name in TEXT_FILES]
    patterns = [path for pattern in ("*.model", "*.tiktoken") for path in directory.glob(pattern)]
    return sorted(path for path in [*named, *patterns] if path.is_file())


def _content(paths: Sequence[Path], cache: HashCache, progress: Progress | None) -> Content:
    return Content({path.name: cache.digest(path, progress) for path in paths})


def _hash(path: Path, size: int, progress: Progress | None) -> str:
    digest = hashlib.sha256()
    done = 0
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None and size > CHUNK:
                progress(f"hashing {path.name}: {done / 2**20:,.0f} of {size / 2**20:,.0f} MiB")
    return digest.hexdigest()
