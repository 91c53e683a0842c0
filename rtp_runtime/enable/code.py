"""Lines of Python in the form that `ruff format` gives them, so that a scaffold needs no formatter."""

from __future__ import annotations

import json
from collections.abc import Sequence

WIDTH = 120
INDENT = "    "


def literal(value: object) -> str:
    """A value from a config as source: whatever a string holds, it stays a string."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(literal(item) for item in value)}]"
    assert value is None or isinstance(value, bool | int | float), value
    return repr(value)


def call(head: str, arguments: Sequence[str], tail: str = ")", *, indent: int = 8, explode: bool = False) -> list[str]:
    """`head` + arguments + `tail`, on one line if it fits, else indented on one, else each on its own.

    `head` ends with the opening bracket. `indent` is the column at which the template puts the first line. An argument
    with line breaks stands on lines of its own.
    """
    flat = ", ".join(arguments)
    simple = "\n" not in flat and not explode
    if simple and indent + len(head + flat + tail) <= WIDTH:
        return [head + flat + tail]
    if simple and indent + len(INDENT + flat) <= WIDTH:
        return [head, INDENT + flat, tail]
    # A lone argument with brackets of its own takes no comma.
    comma = "" if len(arguments) == 1 and "\n" in flat else ","
    inner = [INDENT + line for argument in arguments for line in f"{argument}{comma}".split("\n")]
    return [head, *inner, tail]


def nested(head: str, arguments: Sequence[str], tail: str = ")", *, indent: int) -> str:
    """`call` as one argument of another call."""
    return "\n".join(call(head, arguments, tail, indent=indent))


def from_import(module: str, names: Sequence[str]) -> list[str]:
    """`from module import names`, sorted as the linter wants."""
    ordered = sorted(set(names), key=lambda name: (not name.isupper(), name[0].islower(), name))
    line = f"from {module} import {', '.join(ordered)}"
    if len(line) <= WIDTH:
        return [line]
    return call(f"from {module} import (", ordered, indent=WIDTH, explode=True)


Cases = Sequence[tuple[str | None, str]]
"""(condition, value) as code; the last one has none."""


def choice(cases: Cases) -> str:
    """`a if x else b` on one line."""
    return " ".join(_pieces(cases))


def _pieces(cases: Cases) -> list[str]:
    """The pieces between which a choice may be broken."""
    first, *rest = cases
    pieces = [first[1]]
    for (condition, _), (_, value) in zip(cases, rest, strict=False):
        pieces += [f"if {condition}", f"else {value}"]
    return pieces


def assign(target: str, cases: Cases, *, indent: int) -> list[str]:
    """`target = a if x else b`, in brackets where it is too long for a line."""
    pieces = _pieces(cases)
    flat = " ".join(pieces)
    if "\n" not in flat and indent + len(f"{target} = {flat}") <= WIDTH:
        return [f"{target} = {flat}"]
    head, bracket, rest = flat.partition("(")
    if len(cases) == 1 and "\n" not in flat and head.isidentifier() and rest.endswith(")"):
        return call(f"{target} = {head}{bracket}", [rest.removesuffix(")")], indent=indent)
    if "\n" not in flat and indent + len(INDENT + flat) <= WIDTH:
        return [f"{target} = (", INDENT + flat, ")"]
    return [f"{target} = (", *(INDENT + line for piece in pieces for line in piece.split("\n")), ")"]
