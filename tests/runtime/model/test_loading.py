"""load_model on real tiny checkpoints: parameters as the reference holds them, every tampering refused in time."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_runtime.errors import CheckpointError, ModelError, UnsupportedModelError, UsageError
from rtp_runtime.model import LoadedModel, load_model, loading
from rtp_runtime.model.export import export_model, logical_tensor
from rtp_runtime.plugins import Plugins, load_plugins
from rtp_runtime.testing.tiny_models import write_tiny
from rtp_runtime.weights.headers import read_headers
from rtp_runtime.weights.operations import apply
from rtp_runtime.weights.outputs import split_output

PLAIN = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """Name (and options) -> a checkpoint directory and the reference in memory, each made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str, **options: Any) -> tuple[Path, Any]:
        key = f"{name}{options}"
        if key not in made:
            directory = tmp_path_factory.mktemp(name)
            made[key] = (directory, write_tiny(name, directory, **options))
        return made[key]

    return make


def hub_tensors(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_equals_reference(loaded: LoadedModel, reference: Any) -> None:
    """Every parameter against transformers' own in memory, fused projections through their definition."""
    theirs = dict(reference.named_parameters())
    for parameter in loaded.weights.layout.parameters:
        ours = logical_tensor(loaded.module, parameter.name)
        if parameter.name in theirs:
            assert torch.equal(ours, theirs[parameter.name]), parameter.name
            continue
        stem, leaf = parameter.name.rsplit(".", 2)[0], parameter.name.rsplit(".", 1)[1]
        parts = ("q_proj", "k_proj", "v_proj") if "qkv" in parameter.name else ("gate_proj", "up_proj")
        assert torch.equal(ours, torch.cat([theirs[f"{stem}.{part}.{leaf}"] for part in parts])), parameter.name


@pytest.mark.parametrize("name", PLAIN)
def test_parameters_equal_the_reference(name: str, tiny: Any, plugins: Plugins) -> None:
    directory, reference = tiny(name)
    loaded = load_model(directory, plugins=plugins)
    assert_equals_reference(loaded, reference)
    assert not loaded.module.training and loaded.dtype == torch.float32 and loaded.path == directory
    assert loaded.config.unread_keys() and not any("rope" in key for key in loaded.config.unread_keys())
    assert not any(tensor.is_meta for tensor in (*loaded.module.parameters(), *loaded.module.buffers()))


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_shards(name: str, tiny: Any, plugins: Plugins) -> None:
    directory, reference = tiny(name, max_shard_size=200_000)
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    assert_equals_reference(load_model(directory, plugins=plugins), reference)


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_fused_experts_as_transformers_holds_them_in_memory(
    name: str, tiny: Any, plugins: Plugins, tmp_path: Path
) -> None:
    directory, reference = tiny(name)
    shutil.copy(directory / "config.json", tmp_path)
    save_file({key: tensor.clone() for key, tensor in reference.state_dict().items()}, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path, plugins=plugins)
    assert loaded.weights.layout.name == "fused experts"
    assert_equals_reference(loaded, reference)
    export_model(loaded, tmp_path / "out")
    assert_same_tensors(tmp_path / "out", tmp_path)


@pytest.mark.parametrize("name", PLAIN)
def test_export_round_trip(name: str, tiny: Any, plugins: Plugins, tmp_path: Path) -> None:
    directory, _ = tiny(name, max_shard_size=200_000)
    report = export_model(load_model(directory, plugins=plugins), tmp_path / "out")
    assert report.lossy == ()
    assert_same_tensors(tmp_path / "out", directory)


def assert_same_tensors(exported: Path, original: Path) -> None:
    ours, theirs = hub_tensors(exported), hub_tensors(original)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in theirs)
    files = {key: header.file.name for key, header in read_headers(exported).tensors.items()}
    assert files == {key: header.file.name for key, header in read_headers(original).tensors.items()}


def test_bfloat16_from_float32_is_rounded_and_told(tiny: Any, plugins: Plugins, tmp_path: Path) -> None:
    directory, _ = tiny("qwen3")
    loaded = load_model(directory, dtype="bfloat16", plugins=plugins)
    theirs = hub_tensors(directory)
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(logical_tensor(loaded.module, name), theirs[name].bfloat16())
    assert set(export_model(loaded, tmp_path / "out").lossy) == set(theirs)


def test_split_outputs_are_those_of_the_reference(tiny: Any, plugins: Plugins) -> None:
    directory, reference = tiny("qwen2")
    loaded = load_model(directory, plugins=plugins)
    torch.manual_seed(0)
    hidden = torch.randn(5, 64)
    for layer in range(4):
        ours, theirs = loaded.module.get_submodule(f"model.layers.{layer}"), reference.model.layers[layer]
        for stem, fused in (("self_attn", "qkv_proj"), ("mlp", "gate_up_proj")):
            outputs = torch.cat(list(ours.get_submodule(f"{stem}.{fused}")(hidden)), -1)
            entry = loaded.weights.parameter(f"model.layers.{layer}.{stem}.{fused}.weight")
            for name, output in split_output(entry.source, outputs).items():
                expected = theirs.get_submodule(name.removesuffix(".weight").split(".", 3)[3])(hidden)
                torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6, msg=name)


def test_tied_head_shares_its_memory(tiny: Any, plugins: Plugins) -> None:
    directory, _ = tiny("qwen3")
    module: Any = load_model(directory, plugins=plugins).module
    assert module.lm_head.logical("weight").data_ptr() == module.model.embed_tokens.logical("weight").data_ptr()


def test_dropped_models_free_their_memory(tiny: Any, plugins: Plugins) -> None:
    directory, _ = tiny("qwen3")
    loaded = load_model(directory, plugins=plugins)
    seen = weakref.ref(loaded.module), weakref.ref(next(loaded.module.parameters())), weakref.ref(loaded)
    del loaded
    gc.collect()
    assert [reference() for reference in seen] == [None, None, None]


def test_fingerprint_follows_config_and_headers(tiny: Any, plugins: Plugins, tmp_path: Path) -> None:
    directory, _ = tiny("qwen3")
    base = load_model(directory, plugins=plugins).fingerprint
    assert load_model(directory, plugins=plugins, dtype="bfloat16").fingerprint == base
    shutil.copytree(directory, tmp_path / "edited")
    edit_config(tmp_path / "edited", rms_norm_eps=1e-5)
    assert load_model(tmp_path / "edited", plugins=plugins).fingerprint != base


def edit_config(directory: Path, **values: Any) -> None:
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | values))


# Tampered checkpoints: what is done to a directory, and what the refusal must say.


def rewrite(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def tamper(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return tamper


DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.0.self_attn.q_norm.weight"


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors[DOWN.replace("down_proj", "downproj")] = tensors.pop(DOWN)


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def corrupt(directory: Path) -> None:
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(100)
        file.write(b"\0\0\0")


def shift_offset(directory: Path) -> None:
    path = directory / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header[DOWN]["data_offsets"] = [offset - 128 for offset in header[DOWN]["data_offsets"]]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def split_in_two(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    return {name: tensors[name] for name in names[:9]}, {name: tensors[name] for name in names[9:]}


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_shards(directory: Path, first: dict[str, Any], second: dict[str, Any], index: dict[str, str]) -> None:
    save_file(first, directory / ONE)
    save_file(second, directory / TWO)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def twice_in_two_shards(directory: Path) -> None:
    first, second = split_in_two(directory)
    index = dict.fromkeys(first, ONE) | dict.fromkeys(second, TWO)
    write_shards(directory, first | {NORM: second[NORM] + 1}, second, index)


def missing_shard(directory: Path) -> None:
    first, second = split_in_two(directory)
    write_shards(directory, first, second, dict.fromkeys(first, ONE) | dict.fromkeys(second, TWO))
    (directory / TWO).unlink()


def wrong_index(directory: Path) -> None:
    first, second = split_in_two(directory)
    write_shards(directory, first, second, dict.fromkeys(first, ONE) | dict.fromkeys(second, TWO) | {NORM: ONE})


def only_pickle(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    torch.save({"a": torch.ones(1)}, directory / "pytorch_model.bin")


TAMPERED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "missing": (rewrite(lambda tensors: tensors.pop(DOWN)), ("missing", DOWN, "[64, 96]", "model.safetensors")),
    "renamed": (rewrite(rename), ("missing", DOWN, "downproj", "nearest", "model.safetensors")),
    "wrong shape": (
        rewrite(lambda tensors: tensors.update({DOWN: tensors[DOWN].T.contiguous()})),
        ("shape", DOWN, "[96, 64]", "[64, 96]", "model.safetensors"),
    ),
    "wrong dtype": (
        rewrite(lambda tensors: tensors.update({NORM: tensors[NORM].int()})),
        ("dtype", NORM, "int32", "float32", "model.safetensors"),
    ),
    "fp8 without scales": (
        rewrite(lambda tensors: tensors.update({DOWN: tensors[DOWN].to(torch.float8_e4m3fn)})),
        ("quantised", DOWN, "float8_e4m3fn", "model.safetensors", "not supported yet"),
    ),
    "unexpected bias": (
        rewrite(lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(128)})),
        ("unexpected", "model.layers.0.self_attn.q_proj.bias", "model.safetensors"),
    ),
    "a layer too many": (
        rewrite(lambda tensors: tensors.update({DOWN.replace("1", "3"): torch.ones(64, 96)})),
        ("unexpected", DOWN.replace("1", "3"), "model.safetensors"),
    ),
    "another vocabulary": (
        rewrite(lambda tensors: tensors.update({"model.embed_tokens.weight": torch.ones(400, 64)})),
        ("shape", "model.embed_tokens.weight", "[400, 64]", "[384, 64]"),
    ),
    "a head that cannot be tied": (
        rewrite(lambda tensors: tensors.update({"lm_head.weight": torch.ones(400, 64)})),
        ("tied", "lm_head.weight", "[400, 64]"),
    ),
    "untied in the config only": (
        lambda directory: edit_config(directory, tie_word_embeddings=False),
        ("missing", "lm_head.weight", "tie_word_embeddings = false"),
    ),
    "truncated": (truncate, ("truncated", "model.norm.weight", "model.safetensors")),
    "corrupt header": (corrupt, ("corrupt header", "model.safetensors")),
    "overlapping offsets": (shift_offset, ("corrupt header", DOWN, "model.safetensors")),
    "twice in two shards": (twice_in_two_shards, ("stands twice", NORM, ONE, TWO)),
    "index names a missing shard": (missing_shard, ("missing", TWO, "index.json")),
    "index names another shard": (wrong_index, (NORM, ONE, TWO, "index.json")),
    "only a pickle": (only_pickle, ("pytorch_model.bin", "pickle", "save_pretrained")),
    "no weights": (lambda directory: (directory / "model.safetensors").unlink(), ("no .safetensors file",)),
}


@pytest.fixture
def no_memory_taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loading, "allocate", lambda *_: pytest.fail("memory was taken"))
    monkeypatch.setattr(loading, "build_module", lambda *_: pytest.fail("the module was built"))
    yield


@pytest.mark.usefixtures("no_memory_taken")
@pytest.mark.parametrize("case", TAMPERED)
def test_tampered_checkpoints_are_refused_before_memory_is_taken(
    case: str, tiny: Any, plugins: Plugins, tmp_path: Path
) -> None:
    tamper, words = TAMPERED[case]
    directory = tmp_path / "checkpoint"
    shutil.copytree(tiny("qwen3")[0], directory)
    tamper(directory)
    with pytest.raises(CheckpointError) as caught:
        load_model(directory, plugins=plugins)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_tied_head_that_differs_is_refused(tiny: Any, plugins: Plugins, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(tiny("qwen3")[0], directory)
    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, directory / "model.safetensors")
    loaded = load_model(directory, plugins=plugins)
    export_model(loaded, tmp_path / "out")
    assert torch.equal(hub_tensors(tmp_path / "out")["lm_head.weight"], embedding)
    save_file(tensors | {"lm_head.weight": embedding + 1}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight in model\.safetensors differs"):
        load_model(directory, plugins=plugins)


def test_what_names_no_model(plugins: Plugins, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        load_model(tmp_path / "nowhere", plugins=plugins)
    with pytest.raises(ModelError, match="not found"):
        load_model(tmp_path, plugins=plugins)
    (tmp_path / "config.json").write_text('{"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}')
    with pytest.raises(UnsupportedModelError, match="no plugin provides NobodyForCausalLM"):
        load_model(tmp_path, plugins=plugins)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"dtype": "float16"}, "for GPUs"),
        ({"dtype": "int8"}, "int8"),
        ({"device": "toaster"}, "toaster"),
        ({"device": "cuda:99"}, "cuda:99"),
    ],
)
def test_options_that_cannot_be(option: dict[str, str], message: str, tiny: Any, plugins: Plugins) -> None:
    with pytest.raises(UsageError, match=message):
        load_model(tiny("qwen3")[0], plugins=plugins, **option)  # type: ignore[arg-type]


def test_no_memory(tiny: Any, plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> torch.Tensor:
        raise RuntimeError("you tried to allocate too much")

    monkeypatch.setattr(loading, "allocate", refuse)
    with pytest.raises(ModelError, match=r"the weights take 0\.0 GiB in float32, which cpu does not give: you tried"):
        load_model(tiny("qwen3")[0], plugins=plugins)


def test_a_float16_checkpoint_runs_in_float32_on_the_cpu(
    tiny: Any, plugins: Plugins, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(tiny("qwen3")[0], directory)
    edit_config(directory, dtype="float16")
    tensors = {name: tensor.half() for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors")
    loaded = load_model(directory, plugins=plugins)
    assert loaded.dtype == torch.float32 and "float16" in caplog.text
    norm = "model.norm.weight"
    assert torch.equal(logical_tensor(loaded.module, norm), tensors[norm].float())


def test_operations_describe_what_is_held(tiny: Any, plugins: Plugins) -> None:
    """The lowered tree of each entry, applied by torch to the files, is what the module holds."""
    directory, _ = tiny("qwen2_moe")
    loaded, tensors = load_model(directory, plugins=plugins), hub_tensors(tiny("qwen2_moe")[0])
    for parameter in loaded.weights.layout.parameters:
        assert torch.equal(logical_tensor(loaded.module, parameter.name), apply(parameter.source, tensors))
