"""A directory of evidence: records are added whole or not at all, and read whatever else lies there.

Nothing is ever overwritten. Directories merge by copying one into the other, or by git: names differ, equal copies
count once, and copies that contradict each other count for nothing and are named.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rtp_runtime.errors import UsageError
from rtp_runtime.readiness.content import Content
from rtp_runtime.readiness.record import Record, read_record

MANIFESTS, CACHE = "manifests", "cache"
MAX_BYTES = 16 * 2**20
"""Of a record; a larger file is none."""
CLOCK_SKEW = timedelta(days=1)
"""How far ahead of ours another machine's clock may be: a date beyond it would stay the newest for ever."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A record and the file it lies in, relative to its directory."""

    record: Record
    file: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A file that should be evidence and is not."""

    file: str
    why: str

    def to_json(self) -> dict[str, str]:
        return {"file": self.file, "why": self.why}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a directory holds: sound records, oldest first, and what could not be used."""

    records: tuple[Stored, ...] = ()
    problems: tuple[Problem, ...] = ()


class EvidenceStore:
    """The directory `directory`, which need not exist until something is added."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def cache(self) -> Path:
        """Where this machine keeps what it can compute again; ignored by git."""
        return self.directory / CACHE

    def add(self, record: Record, contents: Iterable[Content] = ()) -> Path:
        """Write a record, and the lists of files that its digests stand for; the record's file.

        Of two results of one second under the same conditions the later one is dated a second later, so that it counts.

        Raises:
            UsageError: the directory cannot be written.
        """
        try:
            (self.directory / MANIFESTS).mkdir(parents=True, exist_ok=True)
            for content in contents:
                file = self._manifest_file(content.digest)
                if not file.exists():
                    write_atomically(file, _manifest_text(content.files))
            while (file := self.directory / record.file_name).exists() and not _holds(file, record):
                record = record.later()
            write_atomically(file, record.to_text())
        except OSError as error:
            raise UsageError(
                f"{error.filename or self.directory}: evidence cannot be written ({error.strerror}): "
                "give a directory that can be written with --evidence, or --no-record"
            ) from error
        return file

    def read(self, now: datetime | None = None) -> Evidence:
        """Every record; damaged, unknown and contradictory files are problems, never errors."""
        found: list[Stored] = []
        problems: list[Problem] = []
        latest = (now or datetime.now(UTC)) + CLOCK_SKEW
        for path in self._files():
            name = path.relative_to(self.directory).as_posix()
            try:
                record = read_record(_read(path), name)
                if record.time > latest:
                    raise UsageError(f"{name}: it is dated {record.date}, in the future: set that machine's clock")
            except UsageError as error:
                problems.append(Problem(name, str(error).removeprefix(f"{name}: ")))
            else:
                found.append(Stored(record, name))
        sound, conflicts = _without_conflicts(found)
        records = sorted(sound, key=lambda each: (each.record.date, each.file))
        return Evidence(tuple(records), tuple(sorted([*problems, *conflicts], key=lambda each: each.file)))

    def manifest(self, digest: str) -> Mapping[str, str] | None:
        """The files that a digest of content stands for, with their own digests; None where that is not known here."""
        try:
            files = json.loads(_read(self._manifest_file(digest)))
        except (UsageError, ValueError, RecursionError):
            return None
        sound = isinstance(files, dict) and all(isinstance(value, str) for value in files.values())
        return files if sound and Content(files).digest == digest else None

    def _manifest_file(self, digest: str) -> Path:
        return self.directory / MANIFESTS / f"{digest[:24]}.json"

    def _files(self) -> Iterator[Path]:
        for folder, folders, names in os.walk(self.directory):
            here = Path(folder)
            folders[:] = sorted(name for name in folders if name not in (MANIFESTS, CACHE) and not name.startswith("."))
            yield from (here / name for name in sorted(names) if name.endswith(".json") and not name.startswith("."))


def write_atomically(file: Path, text: str) -> None:
    """Replace or make a file so that a reader, or a crash, sees all of the text or none of it."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)  # mkstemp's own are for one user only
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def _manifest_text(files: Mapping[str, str]) -> str:
    return json.dumps(dict(sorted(files.items())), indent=0, ensure_ascii=False) + "\n"


def _holds(file: Path, record: Record) -> bool:
    return file.read_text(encoding="utf-8", errors="replace") == record.to_text()


def _read(path: Path) -> str:
    name = path.name
    try:
        if not path.is_file():
            raise UsageError(f"{name}: it is not a file")
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{name}: it has {path.stat().st_size} bytes, more than any record")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{name}: it cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: it is not UTF-8 (byte {error.start})") from error


def _without_conflicts(found: list[Stored]) -> tuple[list[Stored], list[Problem]]:
    """Equal copies once; two records of one kind, date and conditions that say different things not at all."""
    groups: dict[tuple[str, str, str], dict[str, list[Stored]]] = defaultdict(lambda: defaultdict(list))
    for each in found:
        record = each.record
        groups[record.kind, record.date, record.conditions.digest][record.digest].append(each)
    sound: list[Stored] = []
    problems: list[Problem] = []
    for copies in groups.values():
        first, *others = (stored[0] for stored in copies.values())
        if not others:
            sound.append(first)
            continue
        names = sorted(each.file for stored in copies.values() for each in stored)
        why = "they have one date and the same conditions and contradict each other; remove the wrong one"
        problems += [Problem(name, f"conflicts with {', '.join(set(names) - {name})}: {why}") for name in names]
    return sound, problems
