"""What MODEL may be: a directory, an id on the hub; and what is said when it is neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from rtp_runtime.errors import ModelError
from rtp_runtime.model import resolve_checkpoint


def test_a_directory(tmp_path: Path) -> None:
    assert resolve_checkpoint(tmp_path) == resolve_checkpoint(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name", ["/no/such/directory", "./owner/name", "../x/y", "a/b/c", "word", "", "owner/na me", "a/../b"]
)
def test_neither_directory_nor_id(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match="no such directory, and not an id on the hub"):
        resolve_checkpoint(name)


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="is a file"):
        resolve_checkpoint(tmp_path / "model.safetensors")


def test_an_id_downloads_no_pickles_and_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_checkpoint("owner/name@v1.0") == tmp_path
    assert (asked["name"], asked["revision"]) == ("owner/name", "v1.0")
    kept = huggingface_hub.utils.filter_repo_objects(
        ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja", "merges.txt",
         "original/params.json", "onnx/model.safetensors",
         "pytorch_model.bin", "modeling_x.py", "tokenization_x.py", "x.pth", "README.md"],
        allow_patterns=asked["allow_patterns"], ignore_patterns=asked.get("ignore_patterns"),
    )  # fmt: skip
    assert list(kept) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "merges.txt",
    ]


def test_offline_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route to host\nand a page more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        ModelError, match=r"owner/name: no such directory here.*ConnectionError: no route to host\).*Check"
    ) as caught:
        resolve_checkpoint("owner/name")
    assert "\n" not in str(caught.value)
