"""Evidence as files: what is written is read back, directories merge, what is damaged never counts or stops."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
from evidence import package, record

from rtp_runtime.errors import UsageError
from rtp_runtime.readiness import EvidenceStore, Record
from rtp_runtime.readiness.content import Content
from rtp_runtime.readiness.record import read_record

NOW = datetime(2026, 6, 1, tzinfo=UTC)


def names(store: EvidenceStore) -> list[str]:
    return sorted(path.name for path in store.directory.glob("*.json"))


def edited(one: Record, old: str, new: str) -> str:
    text = one.to_text()
    assert old in text
    return text.replace(old, new)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path / "new" / "evidence")
    one = record(numbers={"x": 0.1, "deep": [{"y": None}]}, settings={"b": 1, "a": [2, "c"]})
    content = Content({"a.py": "1" * 64})
    path = store.add(one, [content])
    assert path.name == one.file_name
    [stored] = store.read(NOW).records
    assert stored.record == one
    assert store.manifest(content.digest) == content.files
    assert store.manifest("2" * 64) is None
    # The same record from the same conditions, whatever the order of its keys was.
    assert read_record(json.dumps(json.loads(one.to_text()), sort_keys=True), "f") == one


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path)
    store.add(record())
    store.add(record())
    store.add(record(second=1))
    store.add(record(result="fail"))  # the same second and conditions, another result
    assert len(names(store)) == 3
    assert [each.record.result for each in store.read(NOW).records] == ["pass", "pass", "fail"]
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]


def test_two_machines_merge_by_copying(tmp_path: Path) -> None:
    one, two = EvidenceStore(tmp_path / "one"), EvidenceStore(tmp_path / "two")
    shared = record(second=5)
    for store, machine in ((one, "host a"), (two, "host b")):
        store.add(record(machine=machine), [Content({machine: "1" * 64})])
        store.add(shared)
    assert set(names(one)) & set(names(two)) == {shared.file_name}
    shutil.copytree(two.directory, one.directory, dirs_exist_ok=True)
    shutil.copytree(two.directory, one.directory / "again")  # equal copies elsewhere in the directory count once
    evidence = one.read(NOW)
    assert sorted(each.record.conditions.machine for each in evidence.records) == ["host", "host a", "host b"]
    assert evidence.problems == ()


def test_copies_that_contradict_each_other_count_for_nothing(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path)
    store.add(record(result="pass"))
    (tmp_path / "copy.json").write_text(record(result="fail").to_text())
    store.add(record(second=9))
    evidence = store.read(NOW)
    assert [each.record.time.second for each in evidence.records] == [9]
    assert {problem.file for problem in evidence.problems} == {"copy.json", record().file_name}
    assert all("contradict" in problem.why for problem in evidence.problems)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "not an object"),
        ("<<<<<<< ours\n{}\n=======\n{}\n>>>>>>> theirs\n", "unresolved merge"),
        ('{"schema": 1, "schema": 1}', "stands twice"),
        ('{"schema": 1, "x": NaN}', "finite"),
        ('{"schema": 1, "x": 1e999}', "finite"),
        pytest.param("[" * 100_000, "not JSON", id="deep"),
        ("{}", "schema is missing"),
        (edited(record(), '"schema": 1', '"schema": 2'), "schema 2"),
        (edited(record(), '"schema": 1', '"schema": "1"'), "schema '1'"),
        (edited(record(result="fail"), '"result": "fail"', '"result": "pass"'), "edited"),
        (edited(record(), '"kind": "check"', '"kind": "rumour"'), "'rumour' is unknown"),
        (edited(record(), '"seed": 0', '"seed": "0"'), "give an integer"),
        (edited(record(), "2026-01-01T", "2026-13-01T"), "is no time"),
        (edited(record(), "2026-01-01T", "2126-01-01T"), "edited"),
        (record().to_text().replace('"conditions": {', '"conditions": {\n "mood": "good",'), "mood"),
        (edited(record(), '"settings": {', '"settings": 3, "x": {'), "give a table"),
        (edited(record(), '"summary": "check pass"', '"summary": "\\ud800"'), "half a character"),
    ],
)
def test_a_damaged_file_is_named_and_stops_nothing(text: str, why: str, tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path)
    store.add(record(second=3))
    (tmp_path / "bad.json").write_text(text)
    evidence = store.read(NOW)
    assert [each.record.time.second for each in evidence.records] == [3]
    [problem] = evidence.problems
    assert problem.file == "bad.json"
    assert why in problem.why


def test_other_damage(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path)
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "notes.md").write_text("not evidence")
    future = record(second=0)
    (tmp_path / "future.json").write_text(future.to_text())
    evidence = store.read(datetime(2025, 1, 1, tzinfo=UTC))
    assert evidence.records == ()
    assert {problem.file: problem.why.split(":")[0] for problem in evidence.problems} == {
        "bytes.json": "it is not UTF-8 (byte 0)",
        "future.json": "it is dated 2026-01-01T00",
        "gone.json": "it is not a file",
    }


def test_a_manifest_that_was_edited_is_not_believed(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path)
    content = Content({"a.py": "1" * 64})
    store.add(record(), [content])
    [file] = (tmp_path / "manifests").iterdir()
    file.write_text(file.read_text().replace("1" * 64, "2" * 64))
    assert store.manifest(content.digest) is None


def test_conditions_are_told_apart_by_everything_but_the_path(tmp_path: Path) -> None:
    base = record().conditions
    digests = {
        base.digest,
        record(machine="b").conditions.digest,
        record(device="GPU").conditions.digest,
        record(dtype="bfloat16").conditions.digest,
        record(layout="tp2").conditions.digest,
        record(seed=1).conditions.digest,
        record(settings={"random": True}).conditions.digest,
        record(plugins=(package("p", "1" * 64),)).conditions.digest,
    }
    assert len(digests) == 8
    import dataclasses

    elsewhere = dataclasses.replace(base, model=dataclasses.replace(base.model, given="/elsewhere/m"))
    assert elsewhere.digest == base.digest


def test_a_directory_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        EvidenceStore(file / "evidence").add(record())
