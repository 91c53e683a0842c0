"""Habits that can be counted: sizes, docstrings, no globals, one place for the environment, tools that exist."""

from __future__ import annotations

import ast
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_FILE = 400
MAX_FUNCTION = 30


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def test_files_are_short(root: Path) -> None:
    folders = ("rtp_kernel", "rtp_runtime", "plugins", "tests", "tools")
    files = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    lengths = {str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE} == {}


def test_nine_functions_of_ten_are_short(sources: list[Any]) -> None:
    lengths: dict[str, list[int]] = defaultdict(list)
    for source in sources:
        for function in functions(source.tree):
            lengths[source.package].append((function.end_lineno or 0) - function.lineno + 1)
    for package, found in lengths.items():
        long = sum(length > MAX_FUNCTION for length in found)
        assert long <= len(found) / 10, (
            f"{package}: {long} of {len(found)} functions have more than {MAX_FUNCTION} lines"
        )


def test_every_module_says_what_it_is_responsible_for(sources: list[Any]) -> None:
    assert [str(source.path) for source in sources if not ast.get_docstring(source.tree)] == []


def test_no_module_level_state(sources: list[Any]) -> None:
    broken = [
        f"{source.path}:{node.lineno}"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Global) or (isinstance(node, ast.FunctionDef) and node.name == "get_context")
    ]
    assert broken == []


def test_the_environment_is_read_in_one_module(sources: list[Any]) -> None:
    broken: list[str] = []
    for source in sources:
        for node in ast.walk(source.tree):
            reads = (
                isinstance(node, ast.Attribute) and node.attr in ("getenv", "get") and "environ" in ast.unparse(node)
            )
            reads |= isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ"
            reads |= isinstance(node, ast.Attribute) and node.attr == "getenv"
            if reads and source.module != "rtp_runtime.env":
                broken.append(f"{source.path}:{getattr(node, 'lineno', 0)}")
    assert broken == []


def test_no_notes_to_self_and_no_places_of_one_machine(root: Path) -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|/home/|/Users/|/root/")
    suffixes = (".py", ".md", ".toml", ".txt", ".jinja", ".html")
    folders = ("rtp_kernel", "rtp_runtime", "plugins", "tools", "docs", "tests")
    files = [path for folder in folders for path in sorted((root / folder).rglob("*")) if path.suffix in suffixes]
    here = Path(__file__)
    broken = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in files
        if path.is_file() and path.resolve() != here.resolve()
        for line in path.read_text(encoding="utf-8").splitlines()
        if words.search(line)
    ]
    assert broken == []


def test_the_core_knows_no_model(sources: list[Any]) -> None:
    """Scheduling, paging, sampling and loading never learn a model's name."""
    names = re.compile(r"qwen|deepseek|\bglm|minimax|smollm|mistral|gemma", re.IGNORECASE)
    core = (
        "rtp_kernel",
        "rtp_runtime.engine",
        "rtp_runtime.state",
        "rtp_runtime.weights",
        "rtp_runtime.model",
        "rtp_runtime.text",
    )
    broken = [
        f"{source.path}:{node.lineno} {text}"
        for source in sources
        if source.module.startswith(core)
        for node, text in code_words(source.tree)
        if names.search(text)
    ]
    assert broken == []


def code_words(tree: ast.Module) -> Iterator[tuple[Any, str]]:
    """Identifiers and strings of the code; docstrings may name the source of a formula."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                statement.value.value = None
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node, node.name
        elif isinstance(node, ast.Name):
            yield node, node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node, node.value


def test_one_command_per_chore(root: Path) -> None:
    readme, contributing = (root / "README.md").read_text(), (root / "CONTRIBUTING.md").read_text()
    tools = [path for path in (root / "tools").iterdir() if path.is_file() and not path.suffix]
    for path in tools:
        assert os.access(path, os.X_OK), f"tools/{path.name} cannot be executed"
        assert f"tools/{path.name}" in readme + contributing, f"tools/{path.name} is told nowhere"
    assert "\ntools/test\n" in (root / ".ci" / "run").read_text()


def test_the_readme_tells_every_command(root: Path) -> None:
    from rtp_runtime import cli

    readme = (root / "README.md").read_text()
    for name in cli.COMMANDS:
        assert f"rtp {name}" in readme
