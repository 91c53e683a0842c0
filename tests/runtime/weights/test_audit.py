"""The audit: what a layout asks for against what headers say, with hints, and the choice among layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rtp_runtime.errors import CheckpointError, PluginError
from rtp_runtime.weights import Axis, Concat, FromCheckpoint, Layout, Skip, Split, Stack, Tie, Weight, WeightDescriptors
from rtp_runtime.weights.audit import Audit, audit_layout, choose_layout
from rtp_runtime.weights.descriptors import Descriptor
from rtp_runtime.weights.headers import Headers, read_headers
from rtp_runtime.weights.resolve import resolve

LAYER = {"layer": range(2)}
QKV = Concat(tuple(FromCheckpoint(f"layers.{{layer}}.{name}_proj.weight", (4, 3)) for name in "qkv"))
EMBED = Weight(parameter="embed.weight", source=FromCheckpoint("embed.weight", (5, 3)))
DESCRIPTORS: tuple[Descriptor, ...] = (EMBED, Weight(parameter="layers.{layer}.qkv.weight", source=QKV, over=LAYER))


def stored(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    made = {f"layers.{layer}.{name}_proj.weight": torch.ones(4, 3, dtype=dtype) for layer in range(2) for name in "qkv"}
    return {"embed.weight": torch.ones(5, 3, dtype=dtype), **made}


def write(directory: Path, tensors: dict[str, torch.Tensor]) -> Headers:
    save_file(tensors, directory / "model.safetensors")
    return read_headers(directory)


def audit(
    headers: Headers, *descriptors: Descriptor, dtype: str = "float32", flags: dict[str, bool] | None = None
) -> Audit:
    return audit_layout(resolve(Layout("hub", descriptors or DESCRIPTORS)), headers, dtype, flags)


def messages(found: Audit) -> list[str]:
    return [f"{finding.kind}: {finding.message}" for finding in found.findings]


def test_clean(tmp_path: Path) -> None:
    assert audit(write(tmp_path, stored())).clean


def test_renamed_tensor_is_missing_and_unexpected_with_hints_both_ways(tmp_path: Path) -> None:
    tensors = stored()
    tensors["layers.1.query_proj.weight"] = tensors.pop("layers.1.q_proj.weight")
    missing, unexpected = messages(audit(write(tmp_path, tensors)))
    assert missing == (
        "missing: layers.1.q_proj.weight [4, 3] is not in model.safetensors; nearest there: "
        "layers.1.query_proj.weight, float32 [4, 3] in model.safetensors"
    )
    assert unexpected == (
        "unexpected: layers.1.query_proj.weight, float32 [4, 3] in model.safetensors, is used by nothing; "
        "perhaps it should be called layers.1.q_proj.weight"
    )


def test_a_bias_that_nobody_uses_is_unexpected(tmp_path: Path) -> None:
    found = audit(write(tmp_path, stored() | {"layers.0.q_proj.bias": torch.zeros(4)}))
    assert [(finding.kind, finding.tensor) for finding in found.findings] == [("unexpected", "layers.0.q_proj.bias")]


def test_wrong_shape_names_tensor_file_and_parameter(tmp_path: Path) -> None:
    found = audit(write(tmp_path, stored() | {"layers.0.k_proj.weight": torch.ones(3, 4)}))
    assert messages(found) == [
        "shape: layers.0.k_proj.weight is float32 [3, 4] in model.safetensors; layers.0.qkv.weight needs [4, 3]"
    ]


@pytest.mark.parametrize(
    ("have", "want", "clean"),
    [
        (torch.bfloat16, "float32", True),
        (torch.float32, "bfloat16", True),
        (torch.float16, "bfloat16", True),
        (torch.float64, "float32", True),
        (torch.int32, "float32", False),
        (torch.uint8, "bfloat16", False),
        (torch.float8_e4m3fn, "bfloat16", False),
        (torch.bool, "float32", False),
    ],
)
def test_which_dtypes_may_load(have: torch.dtype, want: str, clean: bool, tmp_path: Path) -> None:
    tensors = stored() | {"embed.weight": torch.ones(5, 3).to(have)}
    found = audit(write(tmp_path, tensors), dtype=want)
    assert [finding.kind for finding in found.findings] == ([] if clean else ["dtype"])


@pytest.mark.parametrize(
    ("have", "pinned", "clean"),
    [
        (torch.bfloat16, "float32", True),
        (torch.int32, "int64", True),
        (torch.int64, "int32", False),
        (torch.int64, "int64", True),
        (torch.float32, "int64", False),
        (torch.uint8, "int64", True),
    ],
)
def test_pinned_dtypes(have: torch.dtype, pinned: str, clean: bool, tmp_path: Path) -> None:
    headers = write(tmp_path, {"bias": torch.ones(3).to(have)})
    found = audit(
        headers, Weight(parameter="bias", source=FromCheckpoint("bias", (3,)), dtype=pinned), dtype="bfloat16"
    )
    assert found.clean == clean


def test_skips_give_their_reason(tmp_path: Path) -> None:
    headers = write(tmp_path, stored() | {"mtp.fc.weight": torch.ones(2)})
    found = audit(headers, *DESCRIPTORS, Skip(r"mtp\..*", "no draft model"))
    assert found.clean and found.skipped == {"mtp.fc.weight": "no draft model"}


def test_rows_that_no_split_takes_are_told(tmp_path: Path) -> None:
    fused = FromCheckpoint("qkv", (12, 3))
    parts = [Weight(parameter=name, source=Split(fused, start, 4)) for name, start in (("q", 0), ("k", 4))]
    headers = write(tmp_path, {"qkv": torch.ones(12, 3)})
    assert messages(audit(headers, *parts)) == [
        "unused: 12 elements of qkv, float32 [12, 3] in model.safetensors, are used by nothing"
    ]
    assert audit(headers, *parts, Weight(parameter="v", source=Split(fused, 8, 4))).clean


def test_many_findings_are_counted(tmp_path: Path) -> None:
    many = Weight(parameter="w.{i}", source=FromCheckpoint("w.{i}", (1,)), over={"i": range(50)})
    report = audit(write(tmp_path, stored()), *DESCRIPTORS, many).report()
    assert report.count("\n") < 10 and "and 44 more" in report


def test_a_tensor_of_two_shapes_is_the_plugins_fault(tmp_path: Path) -> None:
    other = Weight(parameter="other", source=FromCheckpoint("embed.weight", (3, 5)))
    with pytest.raises(PluginError, match=r"embed\.weight is said to be"):
        audit(write(tmp_path, stored()), *DESCRIPTORS, other)


HEAD = Weight(parameter="lm_head.weight", source=FromCheckpoint("lm_head.weight", (5, 3)))
TIE = Tie("lm_head.weight", "embed.weight")


def test_tied_head_absent_or_present(tmp_path: Path) -> None:
    found = audit(write(tmp_path, stored()), *DESCRIPTORS, TIE)
    assert found.clean and found.tied == {}
    found = audit(write(tmp_path, stored() | {"lm_head.weight": torch.ones(5, 3)}), *DESCRIPTORS, TIE)
    assert found.clean and found.tied == {"lm_head.weight": "embed.weight"}
    assert "must equal embed.weight" in found.notes[0]


def test_a_head_that_cannot_be_tied(tmp_path: Path) -> None:
    headers = write(tmp_path, stored() | {"lm_head.weight": torch.ones(6, 3)})
    assert [finding.kind for finding in audit(headers, *DESCRIPTORS, TIE).findings] == ["tied"]


def test_a_head_that_is_missing_tells_every_flag(tmp_path: Path) -> None:
    flags = {"tie_word_embeddings": False, "text_config.tie_word_embeddings": True}
    report = audit(write(tmp_path, stored()), *DESCRIPTORS, HEAD, flags=flags).report()
    assert "missing: lm_head.weight [5, 3]" in report
    assert "tie_word_embeddings = false, text_config.tie_word_embeddings = true" in report
    assert "contradicts itself" in report


def experts(form: str) -> tuple[Descriptor, ...]:
    stacked = Stack(FromCheckpoint("experts.{expert}.w", (2, 3)), "expert", Axis("experts", 4))
    source = stacked if form == "hub" else FromCheckpoint("experts.w", (4, 2, 3))
    return (Weight(parameter="experts.w", source=source),)


def test_the_clean_layout_is_taken(tmp_path: Path) -> None:
    descriptors = WeightDescriptors(*experts("hub"), others=[Layout("fused", experts("fused"))])
    hub, fused = tmp_path / "hub", tmp_path / "fused"
    for directory in (hub, fused):
        directory.mkdir()
    headers = write(hub, {f"experts.{expert}.w": torch.ones(2, 3) for expert in range(4)})
    assert choose_layout(descriptors, headers, "float32").layout.name == "hub"
    assert (
        choose_layout(descriptors, write(fused, {"experts.w": torch.ones(4, 2, 3)}), "float32").layout.name == "fused"
    )


def test_no_clean_layout_shows_each_audit_the_nearest_first(tmp_path: Path) -> None:
    descriptors = WeightDescriptors(*experts("fused"), name="fused", others=[Layout("hub", experts("hub"))])
    headers = write(tmp_path, {f"experts.{expert}.w": torch.ones(2, 3) for expert in range(3)})
    with pytest.raises(CheckpointError) as caught:
        choose_layout(descriptors, headers, "float32")
    text = str(caught.value)
    assert 0 < text.index("layout 'hub'") < text.index("experts.3.w [2, 3]") < text.index("layout 'fused'")
    assert str(tmp_path) in text


def test_two_layouts_that_fit_are_refused_unless_they_are_the_same(tmp_path: Path) -> None:
    headers = write(tmp_path, {"a": torch.ones(2, 2)})
    plain = (Weight(parameter="a", source=FromCheckpoint("a", (2, 2))),)
    nothing = (Skip(".*", "all"),)
    with pytest.raises(CheckpointError, match="layouts 'hub', 'other' all fit"):
        choose_layout(WeightDescriptors(*plain, others=[Layout("other", nothing)]), headers, "float32")
    assert choose_layout(WeightDescriptors(*plain, others=[Layout("same", plain)]), headers, "float32").clean


def test_eight_bit_floats_are_refused_for_what_they_are(tmp_path: Path) -> None:
    tensors = stored()
    name = "layers.1.q_proj.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), name + "_scale_inv": torch.ones(1, 1)}
    headers = write(tmp_path, tensors)
    with pytest.raises(CheckpointError) as refused:
        choose_layout(WeightDescriptors(*DESCRIPTORS), headers, "float32")
    assert str(refused.value) == (
        f"{tmp_path}: 1 of 8 tensors are quantised: {name} is float8_e4m3fn [4, 3] in model.safetensors, with their "
        f"scales apart (as in {name}_scale_inv). FP8 tensors are not supported yet. Take a checkpoint of the model in "
        "bfloat16 or float32, or convert this one to it."
    )
