"""The import rule, and what must not be loaded: a command starts fast, and a plugin sees public names only."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from rtp_runtime import cli

PACKAGES = ("rtp_kernel", "rtp_runtime", "rtp_plugin_")
LIGHT = [
    "rtp_runtime",
    "rtp_runtime.cli",
    "rtp_runtime.errors",
    "rtp_runtime.hookspecs",
    "rtp_runtime.model",
    "rtp_runtime.plugins",
    "rtp_runtime.readiness",
    "rtp_runtime.state",
    "rtp_runtime.state.descriptors",
    "rtp_runtime.text",
    "rtp_runtime.weights",
    "rtp_runtime.weights.descriptors",
    *(f"rtp_runtime.cli.{name}" for name in cli.COMMANDS),
]


def ours(module: str) -> bool:
    return module.startswith(PACKAGES)


def test_the_import_rule(sources: list[Any]) -> None:
    broken: list[str] = []
    for source in sources:
        allowed = {"rtp_kernel": (), "rtp_runtime": ("rtp_kernel",)}.get(source.package, ("rtp_kernel", "rtp_runtime"))
        for module, _, line in source.imports():
            package = module.partition(".")[0]
            if ours(package) and package != source.package and package not in allowed:
                broken.append(f"{source.path}:{line} imports {module}")
    assert broken == []


def test_nobody_names_a_plugin_in_a_string(sources: list[Any]) -> None:
    """Importing by name would be a way around the rule."""
    broken = [
        f"{source.path}:{node.lineno}"
        for source in sources
        if not source.package.startswith("rtp_plugin_")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("rtp_plugin_qwen")
    ]
    assert broken == []


def test_plugins_import_public_names_only(sources: list[Any], promises: Any) -> None:
    broken: list[str] = []
    for source in sources:
        if not source.package.startswith("rtp_plugin_"):
            continue
        for module, name, line in source.imports():
            if not ours(module) or module.startswith(source.package):
                continue
            known = module in promises.PUBLIC_MODULES and promises.public_names(importlib.import_module(module))
            if not known or name not in known:
                broken.append(f"{source.path}:{line} imports {name} from {module}")
    assert broken == []


def test_tests_of_the_runtime_import_no_plugin(root: Path) -> None:
    broken = [
        str(path.relative_to(root))
        for path in sorted((root / "tests").rglob("*.py"))
        if "check_faults" not in path.parts  # faulty copies of a plugin's models, for the checker to find
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rtp_plugin_"))
        or (isinstance(node, ast.Import) and any(alias.name.startswith("rtp_plugin_") for alias in node.names))
    ]
    assert broken == []


def run_fresh(code: str) -> str:
    """What `code` prints in a fresh process."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_loads_no_heavy_package() -> None:
    code = f"""
import importlib, sys
for module in {LIGHT}:
    importlib.import_module(module)
    loaded = {{"torch", "transformers"}} & set(sys.modules)
    if loaded:
        print(module, "loads", *loaded)
        break
"""
    assert run_fresh(code) == ""


def test_registering_loads_no_heavy_package() -> None:
    """And the plugins of this repository register at all."""
    code = """
import sys
from rtp_runtime.plugins import load_plugins
plugins = load_plugins()
print([str(failure) for failure in plugins.failures], *{"torch", "transformers"} & set(sys.modules))
"""
    assert run_fresh(code) == "[]"


def test_descriptors_need_no_torch(sources: list[Any]) -> None:
    for source in sources:
        if source.path.name == "descriptors.py":
            assert not {module.partition(".")[0] for module, _, _ in source.imports()} & {"torch", "transformers"}
