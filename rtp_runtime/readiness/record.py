"""One piece of evidence: what was found, when, and under which conditions. A record is a small JSON file of fixed form.

The form: keys in a fixed order, two spaces of indent, one digest over all of it, so that a hand that edits a record is
seen. `SCHEMA` counts its versions; a record of another version is refused by name and never read as evidence.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from rtp_runtime.errors import UsageError
from rtp_runtime.readiness.declarative import Table, read_json

SCHEMA = 1
KINDS = ("check", "bench", "serve-conformance", "canary", "production")
"""What leaves records; `ladder.STATE_OF` says which state each is evidence for."""
PASS, FAIL, PARTIAL = "pass", "fail", "partial"
RESULTS = (PASS, FAIL, PARTIAL)

_DIGEST = re.compile(r"[0-9a-f]{64}")
_DATE = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Code that took part: a package or plugin, its version, and the digest of its files (see `content`)."""

    name: str
    version: str
    content: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "version": self.version, "content": self.content}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """A checkpoint: how it was named, and digests of its config, all bytes of its weights, and its text files."""

    name: str
    """The hub id, or the directory's own name."""
    given: str
    """As it was named on the command line; not part of the conditions, since it says where, not what."""
    architecture: str
    config: str
    weights: str
    """Empty where there are no weights."""
    text: str
    """Tokenizer, chat template and generation config; empty where there are none."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the digests."""
        return hashlib.sha256(f"{self.config}\n{self.weights}\n{self.text}\n".encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "given": self.given,
            "architecture": self.architecture,
            "fingerprint": self.fingerprint,
            "config": self.config,
            "weights": self.weights,
            "text": self.text,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Everything under which a result holds."""

    model: ModelIdentity
    plugins: tuple[Package, ...]
    """The plugin that serves the model first, then those that it builds on or that add to what it runs."""
    runtime: Package
    kernel: Package
    versions: Mapping[str, str]
    """python, torch, transformers."""
    device: str
    """The device's own name: a GPU's, or the processor's."""
    dtype: str
    layout: str
    """How the model is spread over devices; "1" is one device."""
    seed: int
    machine: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else was asked for and could change the result."""

    @property
    def digest(self) -> str:
        """SHA-256 of all conditions; the same on every machine."""
        values = self.to_json()
        del values["model"]["given"]
        return digest_of(values)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model.to_json(),
            "plugins": [plugin.to_json() for plugin in self.plugins],
            "rtp_runtime": self.runtime.to_json(),
            "rtp_kernel": self.kernel.to_json(),
            "versions": dict(sorted(self.versions.items())),
            "device": self.device,
            "dtype": self.dtype,
            "layout": self.layout,
            "seed": self.seed,
            "machine": self.machine,
            "settings": dict(sorted(self.settings.items())),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One result with its conditions. Immutable: another result is another record."""

    kind: str
    result: str
    summary: str
    """One sentence for people."""
    date: str
    """UTC, to the second: 2026-01-31T12:00:00Z."""
    conditions: Conditions
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def time(self) -> datetime:
        return datetime.strptime(self.date, _DATE).replace(tzinfo=UTC)

    @property
    def digest(self) -> str:
        """SHA-256 over everything that the record says."""
        return digest_of(self._values())

    @property
    def file_name(self) -> str:
        """Kind, model, conditions and date: two machines, or two runs, never write the same file."""
        date = re.sub(r"[-:]", "", self.date)
        return f"{self.kind}-{self.conditions.model.fingerprint[:12]}-{self.conditions.digest[:12]}-{date}.json"

    def later(self) -> Record:
        """The same record, dated a second later."""
        return replace(self, date=(self.time + timedelta(seconds=1)).strftime(_DATE))

    def to_text(self) -> str:
        """The file's text."""
        values = self._values() | {"digest": self.digest}
        return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def _values(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "result": self.result,
            "summary": self.summary,
            "date": self.date,
            "numbers": dict(self.numbers),
            "conditions": self.conditions.to_json(),
        }


def utc_now() -> str:
    """The time, as records give it."""
    return datetime.now(UTC).strftime(_DATE)


def digest_of(values: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_record(text: str, file: str) -> Record:
    """The record in a file's text.

    Raises:
        UsageError: not a record, one of another schema, or one that was edited after it was written.
    """
    table = read_json(text, file)
    if table.take("schema") != SCHEMA:
        raise UsageError(
            f"{file}: it has schema {table.values['schema']!r} and this version of rtp reads {SCHEMA}: "
            "read it with the version that wrote it, or record anew"
        )
    record = Record(
        kind=table.string("kind", choices=KINDS),
        result=table.string("result", choices=RESULTS),
        summary=table.string("summary", empty=True),
        date=_date(table),
        numbers=table.table("numbers").values,
        conditions=_conditions(table.table("conditions")),
    )
    said = table.string("digest")
    table.finish()
    try:
        digest = record.digest
    except UnicodeEncodeError as error:
        raise UsageError(f"{file}: it holds half a character, {error.object[error.start]!r}") from error
    if said != digest:
        raise UsageError(
            f"{file}: its digest is not that of its content: it was edited after it was written; record anew"
        )
    return record


def _conditions(table: Table) -> Conditions:
    found = Conditions(
        model=_model(table.table("model")),
        plugins=tuple(_package(each) for each in table.tables("plugins", empty=True)),
        runtime=_package(table.table("rtp_runtime")),
        kernel=_package(table.table("rtp_kernel")),
        versions=_versions(table.table("versions")),
        device=table.string("device"),
        dtype=table.string("dtype"),
        layout=table.string("layout"),
        seed=table.integer("seed"),
        machine=table.string("machine"),
        settings=table.table("settings").values,
    )
    table.finish()
    return found


def _model(table: Table) -> ModelIdentity:
    found = ModelIdentity(
        name=table.string("name"),
        given=table.string("given"),
        architecture=table.string("architecture"),
        config=_digest(table, "config"),
        weights=_digest(table, "weights", empty=True),
        text=_digest(table, "text", empty=True),
    )
    if table.string("fingerprint") != found.fingerprint:
        raise table.refuse("fingerprint", "is not that of the digests beside it")
    table.finish()
    return found


def _package(table: Table) -> Package:
    found = Package(name=table.string("name"), version=table.string("version"), content=_digest(table, "content"))
    table.finish()
    return found


def _versions(table: Table) -> dict[str, str]:
    return {name: table.string(name) for name in table.values}


def _digest(table: Table, key: str, *, empty: bool = False) -> str:
    value: str = table.string(key, empty=empty)
    if not (_DIGEST.fullmatch(value) or (empty and not value)):
        raise table.refuse(key, f"= {value!r} is no SHA-256")
    return value


def _date(table: Table) -> str:
    value: str = table.string("date")
    try:
        datetime.strptime(value, _DATE)
    except ValueError:
        raise table.refuse("date", f"= {value!r} is no time: give UTC such as 2026-01-31T12:00:00Z") from None
    return value
