"""Reading what people and other machines write (TOML, JSON): every value is checked, and a refusal says its place.

A `Table` hands out its keys one by one and refuses, at the end, those that nobody asked for.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from rtp_runtime.errors import UsageError

REQUIRED: Final = object()
"""Default of a key that must be there."""


class Named(Protocol):
    """What one table of a list stands for, by a name of its own."""

    @property
    def name(self) -> str: ...


NamedT = TypeVar("NamedT", bound=Named)

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""\s*("[^"]*"|'[^']*'|[\w-]+(?:\s*\.\s*[\w-]+)*)\s*=""")


@dataclass(slots=True)
class Table:
    """One table of a file. `path` is its dotted place, empty for the top; `text` the file's text, to find lines in."""

    values: Mapping[str, Any]
    file: str
    path: str = ""
    text: str = ""
    _taken: set[str] = field(default_factory=set)

    def refuse(self, key: str, why: str) -> UsageError:
        """The error for `key`, with its place and, in TOML, its line."""
        place = f"{self.path}.{key}" if self.path and key else self.path or key
        line = (find_line(self.text, place) or find_line(self.text, self.path)) if self.text else None
        return UsageError(f"{self.file}{f':{line}' if line else ''}: {place}{' ' if place else ''}{why}")

    def take(self, key: str, default: Any = REQUIRED) -> Any:
        """The raw value of a key."""
        self._taken.add(key)
        if key in self.values:
            return self.values[key]
        if default is REQUIRED:
            near = difflib.get_close_matches(key, self.values.keys() - self._taken, n=1)
            hint = f"; {near[0]!r} is no key that is known, did you mean {key!r}?" if near else ": give it"
            raise self.refuse(key, f"is missing{hint}")
        return default

    def string(self, key: str, default: Any = REQUIRED, *, choices: Sequence[str] = (), empty: bool = False) -> Any:
        """A text; one of `choices` where there are any."""
        value = self.take(key, default)
        if key not in self.values:
            return value
        if not isinstance(value, str) or not (value or empty):
            raise self.refuse(
                key, f"= {value!r} is not a text: give a string" + ("" if empty else " that is not empty")
            )
        if choices and value not in choices:
            raise self.refuse(key, f"= {value!r} is unknown: give one of {', '.join(choices)}")
        return value

    def boolean(self, key: str, default: Any = REQUIRED) -> Any:
        value = self.take(key, default)
        if key in self.values and not isinstance(value, bool):
            raise self.refuse(key, f"= {value!r} is a {type(value).__name__}: give true or false")
        return value

    def integer(self, key: str, default: Any = REQUIRED, *, low: int = 0) -> Any:
        value = self.take(key, default)
        return value if key not in self.values else self._integer(key, value, low)

    def integers(self, key: str, default: Any = REQUIRED, *, low: int = 0) -> Any:
        """A list of integers without repetition, at least one."""
        value = self.take(key, default)
        if key not in self.values:
            return value
        if not isinstance(value, list) or not value:
            raise self.refuse(key, f"= {value!r}: give a list of integers, at least one")
        numbers = tuple(self._integer(f"{key}[{place}]", each, low) for place, each in enumerate(value))
        if len(set(numbers)) != len(numbers):
            raise self.refuse(key, f"= {value!r} names a number twice: name each once")
        return numbers

    def number(self, key: str, default: Any = REQUIRED, *, low: float = 0.0, open_low: bool = False) -> Any:
        """A finite number from `low` on, or above it."""
        value = self.take(key, default)
        if key not in self.values:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refuse(key, f"= {value!r} is a {type(value).__name__}: give a number")
        inside = value > low if open_low else value >= low
        if not math.isfinite(value) or not inside:
            raise self.refuse(
                key, f"= {value!r} is out of range: give a number {'above' if open_low else 'from'} {low:g}"
            )
        return float(value)

    def strings(self, key: str, default: Any = REQUIRED, *, choices: Sequence[str] = ()) -> Any:
        """A list of texts."""
        value = self.take(key, default)
        if key not in self.values:
            return value
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            raise self.refuse(key, f"= {value!r}: give a list of strings")
        for place, each in enumerate(value):
            if choices and each not in choices:
                raise self.refuse(f"{key}[{place}]", f"= {each!r} is unknown: give one of {', '.join(choices)}")
        return tuple(value)

    def table(self, key: str, default: Any = REQUIRED) -> Any:
        """A table of its own, or the default."""
        value = self.take(key, default)
        if key not in self.values:
            return value
        if not isinstance(value, Mapping):
            raise self.refuse(key, f"= {value!r} is a {type(value).__name__}: give a table")
        return Table(value, self.file, f"{self.path}.{key}" if self.path else key, self.text)

    def tables(self, key: str, *, empty: bool = False) -> Iterator[Table]:
        """The tables of a list; at least one unless it may be `empty`."""
        value = self.take(key)
        sound = isinstance(value, list) and all(isinstance(each, Mapping) for each in value)
        if not sound or not (value or empty):
            raise self.refuse(key, f"is no list of tables: give at least one [[{key}]]")
        for place, each in enumerate(value):
            yield Table(each, self.file, f"{self.path}.{key}[{place}]" if self.path else f"{key}[{place}]", self.text)

    def named(self, key: str, read: Callable[[Table], NamedT]) -> tuple[NamedT, ...]:
        """What `read` makes of each table of a list; no two with one name."""
        found: dict[str, NamedT] = {}
        for table in self.tables(key):
            each = read(table)
            if each.name in found:
                raise table.refuse("name", f"= {each.name!r} stands twice: give each of the {key} a name of its own")
            found[each.name] = each
        return tuple(found.values())

    def finish(self) -> None:
        """
        Raises:
            UsageError: a key that nobody asked for.
        """
        for key in self.values:
            if key not in self._taken:
                near = difflib.get_close_matches(key, self._taken, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"the keys here are {', '.join(sorted(self._taken))}"
                raise self.refuse(key, f"is no key that is known: {hint}")

    def _integer(self, key: str, value: Any, low: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(key, f"= {value!r} is a {type(value).__name__}: give an integer")
        if value < low:
            raise self.refuse(key, f"= {value} is out of range: give {low} or more")
        return value


def read_toml(file: Path, schema: int) -> Table:
    """The top table of a TOML file whose `schema` is the one given.

    Raises:
        UsageError: a file that cannot be read, is not TOML, or is of another schema.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"byte {error.start} is not UTF-8"
        raise UsageError(f"{file}: cannot be read: {why}") from error
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{file}: not TOML: {error}") from error
    table = Table(values, str(file), "", text)
    found = table.integer("schema")
    if found != schema:
        raise table.refuse("schema", f"= {found} is unknown: this version of rtp reads schema {schema}")
    return table


def read_json(text: str, file: str) -> Table:
    """The top object of a JSON text, strictly: no key twice, finite numbers only.

    Raises:
        UsageError: anything else.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice")
        return found

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"{text} is not a finite number")
        return value

    try:
        values = json.loads(text, object_pairs_hook=unique, parse_float=number, parse_constant=number)
    except (ValueError, RecursionError) as error:
        marks = text.startswith("<<<<<<<") or "\n<<<<<<<" in text
        why = "it holds the marks of an unresolved merge: keep one side" if marks else f"it is not JSON ({error})"
        raise UsageError(f"{file}: {why}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{file}: it holds a {type(values).__name__}, not an object")
    return Table(values, file)


def find_line(text: str, place: str) -> int | None:
    """The line of a TOML file on which a dotted place such as `cases[1].bench.batch` is written; None if not found."""
    wanted = re.sub(r"\[\d+\](?=$)", "", place)
    current, counts = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), start=1):
        header = _HEADER.match(line)
        if header:
            current = _header_place(header[1], [part.strip(" \"'") for part in header[2].split(".")], counts)
            if current in (place, wanted):
                return number
        elif (key := _KEY.match(line)) and ".".join(
            part for part in (current, re.sub(r"\s", "", key[1]).strip("\"'")) if part
        ) in (place, wanted):
            return number
    return None


def _header_place(brackets: str, parts: list[str], counts: dict[str, int]) -> str:
    """The dotted place that a header opens; tables of lists carry their number."""
    place = ""
    for depth, part in enumerate(parts):
        name = f"{place}.{part}" if place else part
        if depth == len(parts) - 1 and brackets == "[[":
            counts[name] = counts.get(name, -1) + 1
        place = f"{name}[{counts[name]}]" if name in counts else name
    return place
