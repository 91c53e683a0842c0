"""Breaks lines that are too long where `ruff format` would: at the last bracket, then at commas and clauses."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from rtp_runtime.enable.code import INDENT, WIDTH

PAIRS = {"(": ")", "[": "]", "{": "}"}
CLAUSE = re.compile(r" (?=(?:for|if|else) )")


def reflow(text: str) -> str:
    """The text with every line that is too long broken; lines with comments, and what has no bracket, stay."""
    return "\n".join(part for line in text.split("\n") for part in _fit(line))


def _fit(line: str) -> list[str]:
    if len(line) <= WIDTH or "  #" in line or '"""' in line:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    place = _last_bracket(line)
    if place is None:
        return _terms(line, indent)
    start, stop = place
    head, body, tail = line[: start + 1], line[start + 1 : stop], line[stop:]
    inner = indent + INDENT
    if len(inner + body) <= WIDTH:
        return [head, inner + body, indent + tail]
    parts = list(_parts(body, WIDTH - len(inner)))
    return [head, *(each for part in parts for each in _fit(inner + part)), indent + tail]


def _terms(line: str, indent: str) -> list[str]:
    """A sum that stands in no bracket, a term a line."""
    first, *others = line.split(" + ")
    return [first, *(f"{indent}+ {term}" for term in others)]


def _parts(body: str, room: int) -> Iterator[str]:
    """The arguments, each with its comma; or the clauses of a comprehension or a conditional; or the whole.

    What a comprehension collects stays together where it fits in `room`.
    """
    commas = [place for place, depth, char in _scan(body) if char == "," and depth == 0]
    clauses = [match.start() for match in CLAUSE.finditer(body) if _depth(body, match.start()) == 0]
    loop = next((place for place in clauses if body.startswith(" for ", place)), 0)
    if 0 < loop <= room:
        clauses = [place for place in clauses if place >= loop]
    if clauses and not commas:
        bounds = [0, *(place + 1 for place in clauses), len(body) + 1]
        yield from (body[a : b - 1] for a, b in itertools.pairwise(bounds))
    elif commas:
        arguments = (body[a + 1 : b].strip() for a, b in itertools.pairwise([-1, *commas, len(body)]))
        yield from (f"{argument}," for argument in arguments if argument)
    else:
        yield body


def _last_bracket(line: str) -> tuple[int, int] | None:
    """The last pair of brackets that stands in no other and is not empty."""
    found, start = None, 0
    for place, depth, char in _scan(line):
        if char in PAIRS and depth == 1:
            start = place
        elif char in PAIRS.values() and depth == 0 and place > start + 1:
            found = (start, place)
    return found


def _scan(text: str) -> Iterator[tuple[int, int, str]]:
    """Place, depth of brackets after it, and character, of everything that stands in no string."""
    depth, quote = 0, ""
    for place, char in enumerate(text):
        if quote:
            quote = "" if char == quote and text[place - 1] != "\\" else quote
        elif char in "\"'":
            quote = char
        else:
            depth += (char in PAIRS) - (char in PAIRS.values())
            yield place, depth, char


def _depth(text: str, end: int) -> int:
    return max((depth for place, depth, _ in _scan(text) if place == end), default=1)
