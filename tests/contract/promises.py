"""What users and plugin authors build on, written out: public names, signatures, hooks, errors, command-line options.

`tests/contract/frozen` holds it as promised; `tools/freeze` writes it anew. A difference is a change of the API.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

FROZEN = Path(__file__).parent / "frozen"

PUBLIC_MODULES = (
    "rtp_kernel.batch",
    "rtp_kernel.components",
    "rtp_kernel.registry",
    "rtp_runtime",
    "rtp_runtime.bridge",
    "rtp_runtime.errors",
    "rtp_runtime.model",
    "rtp_runtime.plugins",
    "rtp_runtime.readiness",
    "rtp_runtime.state",
    "rtp_runtime.testing",
    "rtp_runtime.weights",
)
"""Modules that a plugin may import from. What they do not list is private."""


def public_names(module: ModuleType) -> list[str]:
    """`__all__`, or else what the module itself defines without a leading underscore."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return sorted(listed)
    return sorted(name for name in _defined(module) if not name.startswith("_"))


def _defined(module: ModuleType) -> Iterator[str]:
    for statement in ast.parse(inspect.getsource(module)).body:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
            yield statement.name
        elif isinstance(statement, ast.Assign):
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id


def promises() -> dict[str, str]:
    """The text of each frozen file."""
    return {
        "public_names.txt": "\n".join(_names()) + "\n",
        "hooks.txt": "\n".join(_hooks()) + "\n",
        "errors.txt": "\n".join(_errors()) + "\n",
        "cli_options.txt": "\n".join(_options()) + "\n",
    }


def _names() -> Iterator[str]:
    for name in PUBLIC_MODULES:
        module = importlib.import_module(name)
        yield f"{name}"
        for public in public_names(module):
            yield f"    {public}{_signature(getattr(module, public))}"


def _signature(value: Any) -> str:
    """How a function, or a class whose constructor we wrote, is called."""
    written = inspect.isfunction(value) or (inspect.isclass(value) and "__init__" in vars(value))
    ours = getattr(value, "__module__", "").startswith("rtp_")
    return str(inspect.signature(value)) if written and ours else ""


def _hooks() -> Iterator[str]:
    from rtp_runtime import hookspecs, plugins

    yield f"entry points in {hookspecs.ENTRY_POINT_GROUP}, API {hookspecs.API_VERSION}"
    for name, spec in vars(hookspecs).items():
        if name.startswith("rtp_register_"):
            yield f"{name}{inspect.signature(spec)}"
    for registry in ("CommandRegistry", "ExtensionRegistry", "ModelRegistry", "OpRegistrations"):
        yield f"{registry}.add{inspect.signature(getattr(plugins, registry).add)}"


def _errors() -> Iterator[str]:
    from rtp_runtime import errors

    for name in public_names(errors):
        bases = ", ".join(base.__name__ for base in getattr(errors, name).__bases__)
        yield f"{name}({bases})"


def _options() -> Iterator[str]:
    from rtp_runtime import cli

    for name in cli.COMMANDS:
        module = importlib.import_module(f"rtp_runtime.cli.{name}")
        yield f"rtp {name}"
        for action in cli.command_parser(name, module)._actions:
            yield f"    {_option(action)}"


def _option(action: argparse.Action) -> str:
    words = ["/".join(action.option_strings) or action.dest]
    words += [f"choices={'|'.join(map(str, action.choices))}"] if action.choices else []
    words += [f"nargs={action.nargs}"] if action.nargs not in (None, 0) else []
    words += ["required"] if action.required and action.option_strings else []
    words += [f"default={action.default}"] if _has_default(action) else []
    return " ".join(words)


def _has_default(action: argparse.Action) -> bool:
    return all(action.default is not nothing for nothing in (None, False, argparse.SUPPRESS))


if __name__ == "__main__":
    for file, text in promises().items():
        (FROZEN / file).write_text(text, encoding="utf-8")
