"""What can be said of a plugin before its hooks run: the API version from its source, the hooks from their
signatures."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Iterator
from typing import Any

from rtp_runtime import hookspecs
from rtp_runtime.hookspecs import API_VERSION, PROJECT
from rtp_runtime.lazy import find_module
from rtp_runtime.plugins.failures import BadPluginError

_PREFIX = f"{PROJECT}_register_"


def hook_arguments() -> dict[str, str]:
    """Each hook of rtp and the one argument that it passes."""
    specs = {name: spec for name, spec in vars(hookspecs).items() if name.startswith(_PREFIX)}
    return {name: next(iter(inspect.signature(spec).parameters)) for name, spec in specs.items()}


def check_api(module: str, distribution: str | None) -> None:
    """Compare the `RTP_API` literal of a plugin with the runtime's, without importing it. Raises BadPluginError."""
    stated = next((found for name in _with_parents(module) if (found := _stated_api(name)) is not None), None)
    if stated is None:
        raise BadPluginError(
            "outdated",
            f'it states no API version. If it was written for this one, write RTP_API = "{API_VERSION}" '
            f"in the __init__.py of {module.partition('.')[0]}.",
        )
    if stated == API_VERSION:
        return
    package = distribution or module
    newer = _numbers(stated) > _numbers(API_VERSION)
    remedy = "Upgrade rtp-runtime" if newer else f"Upgrade {package}, or see rtp's CHANGELOG for what to change in it"
    raise BadPluginError("outdated", f"it was written for API {stated}; this runtime has API {API_VERSION}. {remedy}.")


def _with_parents(module: str) -> Iterator[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]


def _stated_api(module: str) -> str | None:
    spec = find_module(module)
    get_source = getattr(spec.loader, "get_source", None) if spec is not None else None
    source = get_source(module) if get_source is not None else None
    if source is None:
        return None
    for statement in ast.parse(source).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "RTP_API" for target in targets):
            return _literal(getattr(statement, "value", None))
    return None


def _literal(value: ast.expr | None) -> str:
    if isinstance(value, ast.Constant) and isinstance(value.value, str) and _numbers(value.value):
        return value.value
    written = "nothing" if value is None else ast.unparse(value)
    raise BadPluginError(
        "outdated", f'RTP_API is {written}, not a literal such as "{API_VERSION}": it is read, never run.'
    )


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")
    return tuple(map(int, parts)) if all(part.isascii() and part.isdigit() for part in parts) else ()


def check_hooks(plugin: Any) -> list[str]:
    """The hooks that a plugin (a module or an object) implements.

    Raises BadPluginError for one that would never be called.
    """
    known = hook_arguments()
    marked = {name: value for name, value in _functions(plugin) if hasattr(value, f"{PROJECT}_impl")}
    for name, _ in _functions(plugin):
        if name.startswith(_PREFIX) and name not in marked:
            raise BadPluginError(
                "unmarked", f"{name} lacks the marker and would never be called. Put @rtp_runtime.hookimpl above it."
            )
    for name, function in marked.items():
        _check_hook(name, function, known)
    if not marked:
        raise BadPluginError(
            "empty", f"it has no hook. Define one of {', '.join(known)} and put @rtp_runtime.hookimpl above it."
        )
    return sorted(marked)


def _check_hook(name: str, function: Any, known: dict[str, str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise BadPluginError("misspelt", f"rtp has no hook {name}.{hint} The hooks are {', '.join(known)}.")
    wrong = [parameter for parameter in inspect.signature(function).parameters if parameter != known[name]]
    if wrong:
        raise BadPluginError("misspelt", f"{name} takes {', '.join(wrong)}: rtp passes one argument, {known[name]}.")


def _functions(plugin: Any) -> Iterator[tuple[str, Any]]:
    for name in dir(plugin):
        value = getattr(plugin, name, None)
        if inspect.isroutine(value):
            yield name, value
