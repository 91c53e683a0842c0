"""Headers are read without trust: every damage is told with its file, and nothing but safetensors is opened."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rtp_runtime.errors import CheckpointError
from rtp_runtime.weights.headers import read_file_header, read_headers

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b.weight": torch.ones(4, dtype=torch.bfloat16),
    "count": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 3),
}


def write_shards(directory: Path, shards: Mapping[str, Mapping[str, torch.Tensor]], *, index: bool = True) -> None:
    for file, tensors in shards.items():
        save_file(dict(tensors), directory / file)
    if index:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
        write_index(directory, weight_map)


def write_index(directory: Path, weight_map: Mapping[str, Any]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_reads_what_the_library_reads(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    header = read_file_header(path)
    assert header.metadata == {"format": "pt"} and not header.truncated
    with safe_open(path, "pt") as file:
        assert {tensor.name for tensor in header.tensors} == set(file.keys())
    raw = path.read_bytes()
    for tensor in header.tensors:
        expected = TENSORS[tensor.name]
        assert tensor.shape == tuple(expected.shape) and f"torch.{tensor.dtype}" == str(expected.dtype)
        assert raw[tensor.start : tensor.stop] == bytes(expected.contiguous().view(-1).view(torch.uint8).tolist())


def test_shards_with_and_without_index(tmp_path: Path) -> None:
    shards = {
        "model-00001-of-00002.safetensors": {"a": TENSORS["a"]},
        "model-00002-of-00002.safetensors": {"b": TENSORS["a"]},
    }
    for index in (True, False):
        directory = tmp_path / str(index)
        directory.mkdir()
        write_shards(directory, shards, index=index)
        headers = read_headers(directory)
        assert set(headers.tensors) == {"a", "b"} and len(headers.files) == 2
    assert read_headers(tmp_path / "True").fingerprint() == read_headers(tmp_path / "False").fingerprint()


def test_a_file_beside_the_checkpoint_is_left_out_with_a_note(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "model.safetensors")
    save_file({"x": TENSORS["a"]}, tmp_path / "adapter.safetensors")
    headers = read_headers(tmp_path)
    assert set(headers.tensors) == {"a"} and "adapter.safetensors" in headers.notes[0]


def test_data_may_be_missing_until_it_is_required(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    end = min(tensor.start for tensor in read_file_header(path).tensors)
    with path.open("r+b") as file:
        file.truncate(end)
    headers = read_headers(tmp_path)
    assert set(headers.tensors) == set(TENSORS)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated\. \S+ needs bytes"):
        headers.require_data()


def header_bytes(entries: Mapping[str, Any] | str, data: int) -> bytes:
    raw = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(data)


def entry(start: int, stop: int, shape: Any = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


CORRUPT: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "header"),
    "seven bytes": (b"1234567", "header"),
    "length beyond the file": ((10**6).to_bytes(8, "little") + b"{}", "1000000 bytes long, the file has 10"),
    "absurd length": ((2**63).to_bytes(8, "little") + b"{}", "bytes long"),
    "not JSON": (header_bytes("{nonsense", 0), "not JSON"),
    "not UTF-8": ((4).to_bytes(8, "little") + b"\xff\xfe{}", "not JSON"),
    "deep JSON": (header_bytes("[" * 100_000, 0), "not JSON"),
    "a list": (header_bytes("[1]", 0), "not a JSON object"),
    "a name twice": (header_bytes('{"a": 1, "a": 2}', 0), "'a' stands twice"),
    "entry is a number": (header_bytes({"a": 3}, 0), "'a' lacks"),
    "one offset": (header_bytes({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, 8), "'a' lacks"),
    "unknown dtype": (header_bytes({"a": entry(0, 8, dtype="F31")}, 8), "'F31'"),
    "dtype is a list": (header_bytes({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, 8), "dtype"),
    "negative shape": (header_bytes({"a": entry(0, 8, [-2])}, 8), r"\[-2\]"),
    "shape is a word": (header_bytes({"a": entry(0, 8, "two")}, 8), "two"),
    "fractional shape": (header_bytes({"a": entry(0, 8, [2.0])}, 8), r"2\.0"),
    "negative offset": (header_bytes({"a": entry(-8, 0)}, 8), "-8"),
    "backward offsets": (header_bytes({"a": entry(8, 0)}, 8), "needs 8 bytes, its offsets give -8"),
    "offsets too short": (header_bytes({"a": entry(0, 4)}, 4), "needs 8 bytes, its offsets give 4"),
    "absurd shape": (header_bytes({"a": entry(0, 8, [2**40, 2**40])}, 8), "needs"),
    "overlap": (header_bytes({"a": entry(0, 8), "b": entry(4, 12)}, 12), "'b' at byte .* overlaps 'a'"),
    "gap": (header_bytes({"a": entry(0, 8), "b": entry(12, 20)}, 20), "'b' at byte .* leaves a gap after 'a'"),
    "gap at the start": (header_bytes({"a": entry(4, 12)}, 12), "leaves a gap after 'the header'"),
    "bytes too many": (header_bytes({"a": entry(0, 8)}, 11), "3 bytes follow"),
    "metadata is a list": (header_bytes({"__metadata__": [1]}, 0), "__metadata__"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_corrupt_header(case: str, tmp_path: Path) -> None:
    content, message = CORRUPT[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_headers(tmp_path)
    assert "model.safetensors: corrupt header" in str(caught.value)


def test_what_is_not_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is not a file"):
        read_headers(tmp_path)


def test_index_names_a_missing_shard(tmp_path: Path) -> None:
    write_shards(tmp_path, {"model-1.safetensors": {"a": TENSORS["a"]}})
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    with pytest.raises(CheckpointError, match=r"index\.json: names the shard model-2\.safetensors.*holds 'b'"):
        read_headers(tmp_path)


def test_index_says_another_shard_than_the_file_holds(tmp_path: Path) -> None:
    write_shards(tmp_path, {"model-1.safetensors": {"a": TENSORS["a"]}, "model-2.safetensors": {"b": TENSORS["a"]}})
    write_index(tmp_path, {"a": "model-2.safetensors", "b": "model-1.safetensors"})
    with pytest.raises(CheckpointError, match=r"'a' should lie in model-2\.safetensors, but lies in model-1"):
        read_headers(tmp_path)


def test_index_names_a_tensor_that_no_shard_holds(tmp_path: Path) -> None:
    write_shards(tmp_path, {"model-1.safetensors": {"a": TENSORS["a"]}})
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-1.safetensors"})
    with pytest.raises(CheckpointError, match=r"'b' should lie in .*, but no shard holds it"):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    "files", [("model-1.safetensors", "model-2.safetensors"), ("model.safetensors", "model-2.safetensors")]
)
@pytest.mark.parametrize("index", [True, False])
def test_a_tensor_in_two_shards(files: tuple[str, str], index: bool, tmp_path: Path) -> None:
    write_shards(
        tmp_path,
        {files[0]: {"a": TENSORS["a"], "b": torch.ones(2)}, files[1]: {"a": TENSORS["a"], "c": torch.ones(2)}},
        index=index,
    )
    with pytest.raises(CheckpointError, match="'a' stands twice") as caught:
        read_headers(tmp_path)
    assert all(file in str(caught.value) for file in files)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "\ufffd", "[" * 100_000], ids=range(7)
)
def test_an_index_that_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json: not an index"):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..",
        "x.bin",
        ".safetensors",
        "a\\b.safetensors",
        "c:x.safetensors",
        "x\0.safetensors",
        3,
        None,
        ["x.safetensors"],
    ],
)
def test_names_in_an_index_never_leave_the_directory(name: Any, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    (directory / "sub").mkdir(parents=True)
    for place in (tmp_path / "model.safetensors", directory / "sub" / "x.safetensors"):
        save_file({"a": TENSORS["a"]}, place)
    write_index(directory, {"a": name})
    with pytest.raises(CheckpointError, match="'a' is said to lie in"):
        read_headers(directory)


def write_pickle(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))


def write_gguf(directory: Path) -> None:
    (directory / "model.gguf").write_bytes(b"GGUF")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (write_pickle, "pytorch_model.bin, a pickle.*save_pretrained"),
        (write_gguf, "GGUF.*save_pretrained"),
        (None, "no .safetensors file"),
    ],
)
def test_what_is_no_safetensors_is_not_opened(
    write: Callable[[Path], None] | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if write is not None:
        write(tmp_path)
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("opened"))
    with pytest.raises(CheckpointError, match=message):
        read_headers(tmp_path)
