"""Digests of code: a package's files as they are installed, the same from an editable installation and a wheel."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rtp_runtime.errors import PluginError
from rtp_runtime.lazy import find_module

SUFFIXES = frozenset({".py", ".so", ".pyd", ".c", ".cpp", ".cu", ".cuh", ".h", ".hip", ".json"})
"""Files that can change what is computed."""
LEFT_OUT = frozenset({"__pycache__", "tests"})


@dataclass(frozen=True, slots=True)
class Content:
    """Files by name, each with the SHA-256 of its bytes."""

    files: Mapping[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 over names and digests, sorted by name."""
        whole = hashlib.sha256()
        for name, digest in sorted(self.files.items()):
            whole.update(f"{name} {digest}\n".encode())
        return whole.hexdigest()


def package_content(*modules: str) -> Content:
    """The files of the packages that hold these modules, named from the package on. Imports nothing.

    Raises:
        PluginError: a module that is not there.
    """
    files: dict[str, str] = {}
    for root in dict.fromkeys(_root(module) for module in modules):
        for path, name in _walk(root):
            files[name] = hash_file(path)
    return Content(files)


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def changed_files(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Names of files that differ, are gone ("… removed") or are new ("… added")."""
    changed = [name for name in before if name in after and before[name] != after[name]]
    gone = [f"{name} removed" for name in before if name not in after]
    return sorted([*changed, *gone, *(f"{name} added" for name in after if name not in before)])


def some(names: Iterable[str], limit: int = 4) -> str:
    """The names as a phrase, cut after a few."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


def _root(module: str) -> Path:
    """The folder or file of the outermost package with code of its own that holds `module`."""
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = find_module(".".join(parts[:depth]))
        if spec is None:
            break
        if spec.origin is None or not spec.has_location:
            continue  # a namespace package: others may have put packages into it
        path = Path(spec.origin)
        return path.parent if path.name == "__init__.py" else path
    raise PluginError(
        f"{module}: its files cannot be found, so no evidence about it can be recorded. Install it again."
    )


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    if root.is_file():
        yield root, root.name
        return
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT and not name.startswith("."))
        here = Path(folder)
        for name in sorted(names):
            if Path(name).suffix in SUFFIXES and not name.startswith("."):
                yield here / name, (here / name).relative_to(root.parent).as_posix()
