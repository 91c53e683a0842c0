"""The sources, read once; and the promises."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Source:
    """A Python file of a package: its module's name, text and syntax tree."""

    path: Path
    module: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def imports(self) -> Iterator[tuple[str, str | None, int]]:
        """(module, name or None, line) of every import statement, relative ones resolved."""
        parents = self.module.split(".") if self.path.name == "__init__.py" else self.module.split(".")[:-1]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, None, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = parents[: len(parents) - node.level + 1] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                yield from ((module, alias.name, node.lineno) for alias in node.names)


def _read(path: Path, top: Path) -> Source:
    parts = path.relative_to(top).with_suffix("").parts
    text = path.read_text(encoding="utf-8")
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Source(path.relative_to(ROOT), module, text, ast.parse(text))


@pytest.fixture(scope="session")
def sources() -> list[Source]:
    """Every Python file of both packages and of the plugins."""
    tops = [(ROOT, ROOT / "rtp_kernel"), (ROOT, ROOT / "rtp_runtime")]
    tops += [(top, top) for top in sorted(ROOT.glob("plugins/*/src"))]
    return [_read(path, top) for top, folder in tops for path in sorted(folder.rglob("*.py"))]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def promises() -> ModuleType:
    """The module that writes out what is promised."""
    spec = importlib.util.spec_from_file_location("rtp_contract_promises", Path(__file__).parent / "promises.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
