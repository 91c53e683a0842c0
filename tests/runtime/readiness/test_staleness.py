"""Evidence goes stale by itself: a plugin and a checkpoint are really edited, and the reason names the file."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rtp_runtime.errors import UsageError
from rtp_runtime.plugins import Plugins, load_plugins
from rtp_runtime.readiness import EvidenceStore, assess, record
from rtp_runtime.readiness.checkpoint import HashCache
from rtp_runtime.readiness.content import package_content
from rtp_runtime.readiness.recording import Recorder
from rtp_runtime.readiness.staleness import staleness
from rtp_runtime.readiness.subject import gather_subject

PLUGIN = """
from rtp_runtime.hookspecs import hookimpl

RTP_API = "0.1"


@hookimpl
def rtp_register_models(models):
    models.add("MadeUpForCausalLM", "{name}.parts.model")
"""

Reasons = Callable[[], tuple[str, ...]]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A plugin's package that may be edited; its model's code is never run."""
    name = "rtp_made_up_plugin"
    package = tmp_path / "site" / name
    (package / "parts").mkdir(parents=True)
    (package / "tests").mkdir()
    (package / "__init__.py").write_text(PLUGIN.format(name=name))
    (package / "parts" / "__init__.py").write_text("")
    (package / "parts" / "model.py").write_text("SCALE = 1.0\n")
    (package / "tests" / "test_model.py").write_text("")
    monkeypatch.syspath_prepend(str(package.parent))
    yield package
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        del sys.modules[module]
    importlib.invalidate_caches()


@pytest.fixture
def made_up(model: Path) -> Path:
    """The tiny checkpoint as a model that only the plugin serves."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["MadeUpForCausalLM"]}))
    (model / "tokenizer_config.json").write_text("{}")
    return model


@pytest.fixture
def reasons(made_up: Path, plugin: Path, tmp_path: Path) -> Reasons:
    """Record now; then, whenever asked, why that record is stale."""
    store = EvidenceStore(tmp_path / "evidence")
    name = plugin.name
    record("canary", made_up, result="pass", summary="", dtype="float32", evidence=store.directory, plugins=(name,))

    def ask() -> tuple[str, ...]:
        subject = gather_subject(str(made_up), load_plugins((name,)), store.cache)
        [stored] = store.read().records
        return staleness(stored.record, subject, store.manifest).reasons

    return ask


def test_what_changes_nothing_leaves_it_fresh(reasons: Reasons, plugin: Path, made_up: Path) -> None:
    (plugin / "tests" / "test_model.py").write_text("assert True\n")
    (plugin / "README.md").write_text("words")
    (plugin / "parts" / "__pycache__").mkdir(exist_ok=True)
    (plugin / "parts" / "__pycache__" / "x.py").write_text("")
    os.utime(made_up / "model.safetensors")
    assert reasons() == ()


def test_an_edited_plugin(reasons: Reasons, plugin: Path) -> None:
    (plugin / "parts" / "model.py").write_text("SCALE = 1.1\n")
    (plugin / "parts" / "more.py").write_text("")
    assert reasons() == (
        "plugin rtp_made_up_plugin no version content changed: "
        "rtp_made_up_plugin/parts/model.py, rtp_made_up_plugin/parts/more.py added",
    )


def test_a_plugin_that_is_gone(reasons: Reasons, made_up: Path, tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path / "evidence")
    subject = gather_subject(str(made_up), Plugins(), store.cache)
    [stored] = store.read().records
    assert staleness(stored.record, subject, store.manifest).reasons == (
        "plugin rtp_made_up_plugin no version took part and is not installed or not used now",
    )


@pytest.mark.parametrize("keep_times", [False, True])
def test_one_byte_of_one_tensor(reasons: Reasons, made_up: Path, keep_times: bool) -> None:
    file = made_up / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))
    if keep_times:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert reasons() == ("checkpoint changed: model.safetensors",)


def test_config_tokenizer_and_versions(reasons: Reasons, made_up: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((made_up / "config.json").read_text())
    (made_up / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    (made_up / "tokenizer_config.json").write_text('{"x": 1}')
    (made_up / "chat_template.jinja").write_text("x")
    from rtp_runtime.readiness import subject

    true_code = subject.package_code

    def newer(name: str) -> subject.Code:
        code = true_code(name)
        return dataclasses.replace(code, package=dataclasses.replace(code.package, version="99.0"))

    monkeypatch.setattr(subject, "version_of", lambda name: "99.0")
    monkeypatch.setattr(subject, "package_code", newer)
    found = reasons()
    assert found[:2] == (
        "checkpoint changed: config.json",
        "checkpoint changed: chat_template.jinja added, tokenizer_config.json",
    )
    assert [each.split(" ")[0] for each in found[2:]] == ["runtime", "kernel", "torch", "transformers"]
    assert all("→ 99.0" in each for each in found[2:])


def test_speed_does_not_depend_on_tokenizer_and_reference(
    made_up: Path, plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = EvidenceStore(tmp_path / "evidence")
    record(
        "bench", made_up, result="pass", summary="", dtype="float32", evidence=store.directory, plugins=(plugin.name,)
    )
    (made_up / "tokenizer_config.json").write_text('{"x": 1}')
    from rtp_runtime.readiness import subject

    true_version = subject.version_of
    monkeypatch.setattr(subject, "version_of", lambda name: "99.0" if name == "transformers" else true_version(name))
    [stored] = store.read().records
    found = staleness(
        stored.record, gather_subject(str(made_up), load_plugins((plugin.name,)), store.cache), store.manifest
    )
    assert found.fresh
    assert found.notes[0] == "checkpoint changed: tokenizer_config.json"
    assert found.notes[1].startswith("transformers ") and found.notes[1].endswith("→ 99.0")


def test_without_its_manifests_it_is_stale_all_the_same(reasons: Reasons, plugin: Path, tmp_path: Path) -> None:
    (plugin / "parts" / "model.py").write_text("SCALE = 1.1\n")
    for file in (tmp_path / "evidence" / "manifests").iterdir():
        file.unlink()
    [found] = reasons()
    assert "content changed" in found and "not known" in found


def test_what_changes_while_it_runs_is_not_recorded(made_up: Path, plugin: Path, tmp_path: Path) -> None:
    recorder = Recorder.open(made_up, load_plugins((plugin.name,)), evidence=tmp_path / "evidence")
    assert recorder is not None
    (plugin / "parts" / "model.py").write_text("SCALE = 1.1\n")
    with pytest.raises(UsageError, match=r"changed while it ran.*model\.py"):
        recorder.keep("canary", "pass", "", {}, device="cpu", dtype="float32")
    assert recorder.store.read().records == ()


def test_weights_are_hashed_once(made_up: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    file = made_up / "large.safetensors"
    with file.open("wb") as stream:
        stream.truncate(17 * 2**20)
    first = HashCache(tmp_path / "cache").digest(file, seen.append)
    assert seen and "large.safetensors" in seen[-1]
    seen.clear()
    assert HashCache(tmp_path / "cache").digest(file, seen.append) == first
    assert not seen
    (tmp_path / "cache" / "hashes.json").write_text("[broken")
    assert HashCache(tmp_path / "cache").digest(file, seen.append) == first
    assert (tmp_path / "cache" / ".gitignore").read_text() == "*\n"


def test_content_is_that_of_the_files_wherever_they_are_installed(
    plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    one = package_content(plugin.name)
    assert sorted(one.files) == [
        "rtp_made_up_plugin/__init__.py",
        "rtp_made_up_plugin/parts/__init__.py",
        "rtp_made_up_plugin/parts/model.py",
    ]
    shutil.copytree(plugin, tmp_path / "elsewhere" / plugin.name)
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    assert package_content(f"{plugin.name}.parts.model").digest == one.digest


def test_an_unknown_kind_or_result_is_refused(made_up: Path) -> None:
    with pytest.raises(UsageError, match="kind='rumour' is unknown"):
        record("rumour", made_up, result="pass", summary="", dtype="float32")
    with pytest.raises(UsageError, match="result='green' is unknown"):
        record("canary", made_up, result="green", summary="", dtype="float32")


def test_evidence_of_another_machine_speaks_about_the_same_model_elsewhere(model: Path, tmp_path: Path) -> None:
    """Found by content, whatever the directory is called; a model of the same name is found and stale."""
    record("canary", model, result="pass", summary="kept", dtype="float32", evidence=tmp_path / "e")
    moved = model.rename(model.with_name("moved"))
    rung = assess(moved, evidence=tmp_path / "e").rungs[4]
    assert (rung.state, rung.status) == ("canary-ready", "blocked")
    assert rung.evidence[0].record.summary == "kept"
    named = moved.rename(model)
    config = json.loads((named / "config.json").read_text())
    (named / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert assess(named, evidence=tmp_path / "e").rungs[4].status == "stale"
