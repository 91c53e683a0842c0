"""docs/adding-a-model.md does what it says: its files are written and its commands run, in order, without a network."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rtp_runtime.cli import main
from rtp_runtime.testing import tiny_checkpoint

GUIDE = Path(__file__).parents[3] / "docs/adding-a-model.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> Iterator[tuple[str, str]]:
    for match in BLOCK.finditer(GUIDE.read_text(encoding="utf-8")):
        yield match[1], match[2]


class Shell:
    """Runs the guide's lines; Python in this process, which has torch already. pip gets a folder of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.installed = folder / "installed"
        self.installed.mkdir()
        self._patch = monkeypatch
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(self.installed)

    def run(self, line: str) -> int:
        line, _, allowed = line.partition(" || test $? = ")
        words = shlex.split(line)
        source = words.pop(0).removeprefix("PYTHONPATH=") if words[0].startswith("PYTHONPATH=") else None
        if words[0] == "rtp":
            with self._patch.context() as patch:
                if source is not None:
                    patch.syspath_prepend(source)
                return main(words[1:]) - int(allowed or 0)
        return self._outside(words, source)

    def _outside(self, words: list[str], source: str | None) -> int:
        path = [str(self.installed), *([source] if source else [])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        if words[0] == "pip":
            options = ["--target", str(self.installed), "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
            words = ["python", "-m", *words, *options]
        assert words[0] == "python"
        if words[1] == "-c":
            exec(words[2], {})
            return 0
        if words[1:3] == ["-m", "rtp_runtime.testing.checkpoints"]:
            tiny_checkpoint(*words[3:])
            return 0
        return subprocess.run([sys.executable, *words[1:]], env=environment, check=False).returncode


@pytest.mark.timeout(600)
def test_files_and_commands_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(tmp_path, monkeypatch)
    for language, text in blocks():
        if language == "console":
            for line in text.splitlines():
                assert line.startswith("$ "), f"not a command: {line}"
                assert shell.run(line[2:]) == 0, line
        else:
            first, _, rest = text.partition("\n")
            file = tmp_path / first.removeprefix("# ")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(rest if language == "python" else text)
