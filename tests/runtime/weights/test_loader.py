"""Plan, load and export on small handmade checkpoints: bytes read, every element once, the same bytes back."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rtp_runtime.errors import CheckpointError, UsageError
from rtp_runtime.weights import (
    Axis,
    Concat,
    Descriptor,
    FromCheckpoint,
    Interleave,
    Layout,
    Permute,
    Skip,
    Split,
    Stack,
    Tie,
    Weight,
    reading,
)
from rtp_runtime.weights.audit import audit_layout
from rtp_runtime.weights.dtypes import torch_dtype
from rtp_runtime.weights.export import ExportReport, export_weights
from rtp_runtime.weights.headers import read_headers
from rtp_runtime.weights.loaded import LoadedWeights
from rtp_runtime.weights.loader import allocate, load_weights, verify_ties
from rtp_runtime.weights.lowering import Units
from rtp_runtime.weights.operations import apply
from rtp_runtime.weights.plan import LoadPlan, plan_load
from rtp_runtime.weights.resolve import resolve

HEADS = Axis("heads", 4, 2)
DESCRIPTORS: tuple[Descriptor, ...] = (
    Weight(parameter="qk", source=Concat((FromCheckpoint("q", (HEADS, 3)), FromCheckpoint("k", (HEADS, 3))))),
    Weight(parameter="out", source=FromCheckpoint("out", (3, HEADS))),
    Weight(parameter="turned", source=Permute(FromCheckpoint("conv", (5, 4)), (1, 0))),
    Weight(parameter="turns", source=Interleave(Permute(FromCheckpoint("fused", (2, 3, 4)), (0, 2, 1)), 2, dim=1)),
    Weight(parameter="gate", source=Split(FromCheckpoint("gate_up", (6, 3)), 0, 3)),
    Weight(parameter="up", source=Split(FromCheckpoint("gate_up", (6, 3)), 3, 3)),
    Weight(parameter="experts", source=Stack(FromCheckpoint("e.{expert}", (2, 3)), "expert", Axis("experts", 3))),
    Weight(parameter="bias", source=FromCheckpoint("bias", (3,)), dtype="float32"),
    Weight(parameter="ids", source=FromCheckpoint("ids", (2, 2)), dtype="int64"),
    Weight(parameter="scalar", source=FromCheckpoint("scalar", ())),
    Tie("head", "out"),
    Skip("mtp.*", "no draft model"),
)
SHAPES = {
    "q": (8, 3),
    "k": (8, 3),
    "out": (3, 8),
    "conv": (5, 4),
    "fused": (2, 3, 4),
    "gate_up": (6, 3),
    "bias": (3,),
    "scalar": (),
}


def stored(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {name: torch.randn(dims).to(dtype) for name, dims in SHAPES.items()}
    made |= {f"e.{expert}": torch.randn(2, 3).to(dtype) for expert in range(3)}
    return made | {"ids": torch.arange(4).view(2, 2), "mtp.fc": torch.ones(7)}


def open_weights(directory: Path, units: Units | None = None, dtype: str = "float32") -> LoadedWeights:
    headers = read_headers(directory)
    layout = resolve(Layout("hub", DESCRIPTORS), units)
    audit = audit_layout(layout, headers, dtype)
    return LoadedWeights(headers, audit, plan_load(layout, headers))


def load(weights: LoadedWeights, dtype: str = "float32") -> dict[str, torch.Tensor]:
    parameters = {
        parameter.name: allocate(parameter.shape, torch_dtype(parameter.dtype_in(dtype)), "cpu")
        for parameter in weights.layout.parameters
    }
    load_weights(weights.layout, weights.plan, parameters)
    return parameters


def write_two_shards(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    directory.mkdir(exist_ok=True)
    names = sorted(tensors)
    half = len(names) // 2
    files = {"model-00001-of-00002.safetensors": names[:half], "model-00002-of-00002.safetensors": names[half:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in files.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("piece_bytes", [1, 30, 16 << 20])
def test_loads_what_the_operations_make(piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", piece_bytes)
    tensors = stored()
    write_two_shards(tmp_path, tensors)
    weights = open_weights(tmp_path)
    assert weights.audit.clean
    parameters = load(weights)
    for descriptor in DESCRIPTORS:
        if isinstance(descriptor, Weight):
            assert torch.equal(parameters[descriptor.parameter], apply(descriptor.source, tensors)), (
                descriptor.parameter
            )


def test_reads_are_in_file_order_and_leave_out_what_is_skipped(tmp_path: Path) -> None:
    tensors = stored()
    write_two_shards(tmp_path, tensors)
    plan = open_weights(tmp_path).plan
    places = [(read.tensor.file.name, read.start) for read in plan.reads]
    assert places == sorted(places)
    assert {read.tensor.name for read in plan.reads} == set(tensors) - {"mtp.fc"}
    assert (
        plan.num_bytes == plan.kept_bytes == sum(tensor.nbytes for name, tensor in tensors.items() if name != "mtp.fc")
    )
    assert sum(plan.files().values()) == plan.num_bytes and list(plan.files()) == [
        file.path for file in open_weights(tmp_path).headers.files
    ]


def test_a_rank_reads_its_rows_and_more_only_along_later_axes(tmp_path: Path) -> None:
    tensors = stored()
    save_file(tensors, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path, {"heads": [1, 2], "experts": [2, 0]})
    reads = {read.tensor.name: read for read in weights.plan.reads}
    assert (reads["q"].first, reads["q"].last) == (2, 6) and reads["q"].num_bytes == 4 * 3 * 4
    assert reads["out"].num_bytes == 3 * 8 * 4 and reads["out"].kept_bytes == 3 * 4 * 4
    assert "e.1" not in reads
    assert weights.plan.num_bytes - weights.plan.kept_bytes == 3 * 4 * 4
    parameters = load(weights)
    assert torch.equal(parameters["qk"], torch.cat([tensors["q"][2:6], tensors["k"][2:6]]))
    assert torch.equal(parameters["out"], tensors["out"][:, 2:6])
    assert torch.equal(parameters["experts"], torch.stack([tensors["e.2"], tensors["e.0"]]))


@pytest.mark.parametrize(
    ("have", "want"), [(torch.bfloat16, "float32"), (torch.float32, "bfloat16"), (torch.float16, "bfloat16")]
)
def test_casts(have: torch.dtype, want: str, tmp_path: Path) -> None:
    tensors = stored(have)
    save_file(tensors, tmp_path / "model.safetensors")
    parameters = load(open_weights(tmp_path, dtype=want), want)
    assert torch.equal(parameters["out"], tensors["out"].to(torch_dtype(want)))
    assert parameters["bias"].dtype == torch.float32 and torch.equal(parameters["bias"], tensors["bias"].float())
    assert parameters["ids"].dtype == torch.int64


def test_progress_counts_the_bytes(tmp_path: Path) -> None:
    save_file(stored(), tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    seen: list[tuple[int, int]] = []
    parameters = {name: allocate(each.shape, torch.float32, "cpu") for name, each in weights.layout.by_name.items()}
    parameters["ids"] = parameters["ids"].long()
    load_weights(weights.layout, weights.plan, parameters, lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (weights.plan.num_bytes, weights.plan.num_bytes)


def test_elements_that_are_not_written_are_counted(tmp_path: Path) -> None:
    save_file(stored(), tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    parameters = {name: allocate(each.shape, torch.float32, "cpu") for name, each in weights.layout.by_name.items()}
    fewer = LoadPlan(tuple(read for read in weights.plan.reads if read.tensor.name != "k"))
    with pytest.raises(CheckpointError, match="qk: 24 of 48 elements were written"):
        load_weights(weights.layout, fewer, parameters)
    assert parameters["qk"][8:].isnan().all() and not parameters["qk"][:8].isnan().any()
    twice = LoadPlan((*weights.plan.reads, next(read for read in weights.plan.reads if read.tensor.name == "q")))
    with pytest.raises(CheckpointError, match="qk: 72 of 48 elements were written"):
        load_weights(weights.layout, twice, parameters)


def test_nan_in_the_file_is_refused_and_infinities_are_not(tmp_path: Path) -> None:
    tensors = stored()
    tensors["q"][0, 0], tensors["q"][1, 1] = math.inf, -math.inf
    save_file(tensors, tmp_path / "model.safetensors")
    load(open_weights(tmp_path))
    tensors["k"][3, 1] = math.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="qk: NaN after loading; the file holds NaN in k"):
        load(open_weights(tmp_path))


def test_a_file_that_shrinks_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(stored(), path)
    weights = open_weights(tmp_path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4)
    before = threading.active_count()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: ends within \S+, at byte"):
        load(weights)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        load(weights)
    assert threading.active_count() == before


def test_a_failing_progress_ends_the_reader(tmp_path: Path) -> None:
    save_file(stored(), tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    parameters = {name: allocate(each.shape, torch.float32, "cpu") for name, each in weights.layout.by_name.items()}
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        load_weights(weights.layout, weights.plan, parameters, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert threading.active_count() == before


def test_ties_are_compared(tmp_path: Path) -> None:
    tensors = stored()
    for head, fits in ((tensors["out"].clone(), True), (tensors["out"] + 1e-7, False)):
        save_file(tensors | {"head": head}, tmp_path / "model.safetensors")
        weights = open_weights(tmp_path)
        assert weights.audit.tied == {"head": "out"}
        parameters = load(weights)
        if fits:
            verify_ties(weights.audit.tied, weights.headers, parameters)
        else:
            with pytest.raises(
                CheckpointError, match=r"head in model\.safetensors differs from out.*tie_word_embeddings"
            ):
                verify_ties(weights.audit.tied, weights.headers, parameters)


def export(weights: LoadedWeights, parameters: dict[str, torch.Tensor], dtype: str, out: Path) -> ExportReport:
    return export_weights(parameters.__getitem__, weights, dtype, out)


@pytest.mark.parametrize(
    ("have", "want"), [(torch.float32, "float32"), (torch.bfloat16, "float32"), (torch.bfloat16, "bfloat16")]
)
def test_export_returns_names_dtypes_files_and_bytes(have: torch.dtype, want: str, tmp_path: Path) -> None:
    tensors = stored(have)
    tensors["head"] = tensors["out"].clone()
    write_two_shards(tmp_path / "in", tensors)
    weights = open_weights(tmp_path / "in", dtype=want)
    report = export(weights, load(weights, want), want, tmp_path / "out")
    assert report.lossy == ()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert [file.name for file in report.files] == names == sorted(path.name for path in (tmp_path / "out").iterdir())
    del tensors["mtp.fc"]
    back: dict[str, torch.Tensor] = {}
    for name in names[:2]:
        file = load_file(tmp_path / "out" / name)
        with safe_open(tmp_path / "out" / name, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        assert set(file) == set(load_file(tmp_path / "in" / name)) - {"mtp.fc"}
        back |= file
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name
    assert set(read_headers(tmp_path / "out").tensors) == set(tensors)


def test_export_lists_what_was_rounded(tmp_path: Path) -> None:
    tensors = stored() | {"head": stored()["out"]}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path, dtype="bfloat16")
    report = export(weights, load(weights, "bfloat16"), "bfloat16", tmp_path / "out")
    assert set(report.lossy) == set(tensors) - {"bias", "ids", "mtp.fc"}
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(back["bias"], tensors["bias"])
    assert torch.equal(back["q"], tensors["q"].bfloat16().float())


def test_export_never_overwrites_and_leaves_nothing_behind(tmp_path: Path) -> None:
    save_file(stored(), tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    parameters = load(weights)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match=r"model\.safetensors: is there already"):
        export(weights, parameters, "float32", tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    with pytest.raises(UsageError, match="is a file"):
        export(weights, parameters, "float32", tmp_path / "model.safetensors")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is there already"):
        export(weights, parameters, "float32", tmp_path / "link")
    with pytest.raises(KeyError):
        export(weights, {}, "float32", tmp_path / "failed")
    assert list((tmp_path / "failed").iterdir()) == [] and not (tmp_path / "elsewhere").exists()


def test_export_of_a_tensor_that_several_parameters_share(tmp_path: Path) -> None:
    """`gate` and `up` are split from one tensor; many experts go through the cache of parameters more than once."""
    tensors = stored()
    save_file(tensors, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    parameters = load(weights)
    parameters["up"] = torch.full_like(parameters["up"], 5.0)
    export(weights, parameters, "float32", tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")["gate_up"]
    assert torch.equal(back[:3], tensors["gate_up"][:3]) and (back[3:] == 5).all()
