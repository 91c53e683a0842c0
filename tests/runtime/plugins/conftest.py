"""Distributions written to a temporary folder as pip would leave them, and rtp run on them in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HEADER = 'from rtp_runtime import hookimpl\n\nRTP_API = "0.1"\n\n'

_RUN = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from rtp_runtime.cli import main
status = main()
loaded = {"torch", "transformers"} & set(sys.modules)
sys.exit(f"loaded {loaded}" if loaded else status)
"""


@dataclass(frozen=True)
class Site:
    """A folder on sys.path."""

    path: Path

    def install(
        self,
        name: str,
        sources: Mapping[str, str],
        *,
        plugin: str | None = None,
        value: str | None = None,
        info: str | None = None,
        metadata: bool = True,
    ) -> Path:
        """Write a distribution and its metadata. The entry point is its first module unless `value` is given."""
        for file, source in sources.items():
            path = self.path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
        folder = self.path / (info or f"{name.replace('-', '_')}-1.0.dist-info")
        folder.mkdir(parents=True)
        module = value or next(iter(sources)).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        (folder / "entry_points.txt").write_text(f"[rtp.plugins]\n{plugin or name} = {module}\n")
        if metadata:
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (folder / "RECORD").write_text("".join(f"{file},,\n" for file in sources))
        return folder

    def plugin(self, name: str, body: str, *, header: str = HEADER, **options: Any) -> Path:
        """Install a plugin of one module, with an empty model module beside it."""
        module = name.replace("-", "_")
        return self.install(name, {f"{module}/__init__.py": header + body, f"{module}/model.py": ""}, **options)

    def rtp(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """`rtp ARGUMENTS` in a fresh process that finds this folder, and that fails if torch was loaded."""
        command = [sys.executable, "-c", _RUN, str(self.path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(env or {}))

    def plugins(self, *arguments: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        """What `rtp plugins --json` prints: the whole of stdout is one object."""
        result = self.rtp("plugins", "--json", *arguments, env=env)
        assert result.returncode == 0, result.stderr
        report: dict[str, Any] = json.loads(result.stdout)
        return report


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An empty folder to install into."""
    return Site(tmp_path / "site")


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """One for all tests of a module."""
    return Site(tmp_path_factory.mktemp("site"))
