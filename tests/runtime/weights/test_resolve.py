"""Descriptors written out: one entry per parameter, contradictions refused."""

from __future__ import annotations

import pytest

from rtp_runtime.errors import PluginError
from rtp_runtime.weights import FromCheckpoint, Layout, Skip, Tie, Weight
from rtp_runtime.weights.resolve import resolve

LAYERS = Weight(parameter="layers.{layer}.w", source=FromCheckpoint("h.{layer}.w", (2,)), over={"layer": [0, 2]})


def test_one_entry_for_each_value_of_each_field() -> None:
    pairs = Weight(parameter="{a}.{b}", source=FromCheckpoint("x.{b}.{a}", (1,)), over={"a": range(2), "b": range(3)})
    resolved = resolve(Layout("hub", (LAYERS, pairs)))
    assert [parameter.name for parameter in resolved.parameters] == [
        "layers.0.w", "layers.2.w", "0.0", "0.1", "0.2", "1.0", "1.1", "1.2",
    ]  # fmt: skip
    assert resolved.by_name["layers.2.w"].shape == (2,)


def test_pinned_dtypes() -> None:
    resolved = resolve(
        Layout("hub", (LAYERS, Weight(parameter="b", source=FromCheckpoint("b", (1,)), dtype="float32")))
    )
    assert resolved.by_name["layers.0.w"].dtype_in("bfloat16") == "bfloat16"
    assert resolved.by_name["b"].dtype_in("bfloat16") == "float32"


def test_skips_match_whole_names() -> None:
    resolved = resolve(Layout("hub", (Skip(r"mtp\..*", "no draft model"), Skip("x", "unused"))))
    assert resolved.skip_reason("mtp.fc.weight") == "no draft model"
    assert resolved.skip_reason("xx") is None and resolved.skip_reason("a.mtp.fc") is None


@pytest.mark.parametrize(
    ("descriptors", "message"),
    [
        ((LAYERS, LAYERS), "describes layers.0.w twice"),
        ((LAYERS, Tie("layers.0.w", "layers.2.w")), "describes layers.0.w twice"),
        ((LAYERS, Tie("head", "embed")), "ties head to embed, which it does not describe"),
        ((Skip("(", "broken"),), r"Skip\('\('\): not a regular expression"),
        ((Weight(parameter="w.{layer}", source=FromCheckpoint("w", (1,))),), "field that `over` does not give"),
        ((Weight(parameter="w", source=FromCheckpoint("w", (1,)), dtype="float33"),), "float33"),
    ],
)
def test_contradictions(descriptors: tuple[object, ...], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        resolve(Layout("hub", descriptors))  # type: ignore[arg-type]
