"""What tools/change-lines counts, on a history made for it and on this repository's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(("git", *who, *words), cwd=folder, check=True, capture_output=True)


def count(root: Path, folder: Path) -> dict[str, dict[str, dict[str, int]]]:
    command = [sys.executable, str(root / "tools" / "change_lines.py"), "--json"]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    found: dict[str, dict[str, dict[str, int]]] = json.loads(done.stdout)
    return found


def write(path: Path, num_lines: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x = 1\n" * num_lines)


def test_counts_by_place(root: Path, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    write(tmp_path / "plugins/a/src/a/model.py", 7)
    write(tmp_path / "plugins/a/tests/test_model.py", 3)
    write(tmp_path / "rtp_kernel/ops/new.py", 2)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "Add one\n\nEnables: one")
    write(tmp_path / "rtp_runtime/state/kinds.py", 5)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "A kind\n\nMechanism: kind")
    write(tmp_path / "rtp_runtime/state/kinds.py", 4)  # one line less
    git(tmp_path, "commit", "-q", "-a", "-m", "Unrelated")
    assert count(root, tmp_path) == {
        "models": {"one": {"plugin": 7, "plugin tests": 3, "rtp_kernel": 2}},
        "mechanisms": {"kind": {"rtp_runtime/state": 5}},
    }


def test_no_model_changed_the_runtime(root: Path) -> None:
    shallow = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"], cwd=root, capture_output=True, text=True, check=False
    )
    if shallow.stdout.strip() != "false":
        pytest.skip("no history here")
    models = count(root, root)["models"]
    assert {
        model: place for model, places in models.items() for place in places if place.startswith("rtp_runtime")
    } == {}
