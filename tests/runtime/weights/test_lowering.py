"""Shards: what a rank gets is what loading everything and cutting the named axes gives."""

from __future__ import annotations

import pytest
import torch

from rtp_runtime.errors import PluginError, UsageError
from rtp_runtime.weights import Axis, Concat, FromCheckpoint, Interleave, Permute, Reshape, Source, Split, Stack
from rtp_runtime.weights.lowering import Units, axes, lower, share
from rtp_runtime.weights.operations import apply, needs, shape
from rtp_runtime.weights.regions import full

HEADS, KV_HEADS, DIM, HIDDEN = 8, 2, 3, 5
Q = FromCheckpoint("q", (Axis("q heads", HEADS, DIM), HIDDEN))
K = FromCheckpoint("k", (Axis("kv heads", KV_HEADS, DIM, replicable=True), HIDDEN))
V = FromCheckpoint("v", (Axis("kv heads", KV_HEADS, DIM, replicable=True), HIDDEN))
EXPERTS = Axis("experts", 4)
INTERMEDIATE = Axis("intermediate", 6)
GATE = FromCheckpoint("gate.{expert}", (INTERMEDIATE, HIDDEN))
UP = FromCheckpoint("up.{expert}", (INTERMEDIATE, HIDDEN))
GATE_UP = Stack(Concat((GATE, UP)), "expert", EXPERTS)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {"q": torch.randn(HEADS * DIM, HIDDEN), "out": torch.randn(HIDDEN, HEADS * DIM)}
    made |= {name: torch.randn(KV_HEADS * DIM, HIDDEN) for name in ("k", "v")}
    made |= {f"{name}.{expert}": torch.randn(6, HIDDEN) for name in ("gate", "up") for expert in range(4)}
    return made


def shares(source: Source, rank: int, size: int) -> Units:
    return {axis.name: share(axis, rank, size) for axis in axes(source)}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_shard_of_a_fused_parameter_is_the_fusion_of_its_parts_shards(size: int) -> None:
    stored, fused = tensors(), Concat((Q, K, V))
    for rank in range(size):
        q = stored["q"].unflatten(0, (size, -1))[rank]
        kv_heads = max(KV_HEADS // size, 1)
        first = rank * KV_HEADS // size
        k, v = (stored[name].unflatten(0, (KV_HEADS, DIM))[first : first + kv_heads].flatten(0, 1) for name in "kv")
        made = apply(lower(fused, units=shares(fused, rank, size)), stored)
        assert torch.equal(made, torch.cat([q, k, v]))


@pytest.mark.parametrize("units", [{"experts": [2, 3]}, {"experts": [3, 0, 3]}, {"intermediate": range(3, 6)}])
def test_experts_by_a_map_and_the_intermediate_axis(units: Units) -> None:
    stored = tensors()
    rows = list(units.get("intermediate", range(6)))
    expected = torch.stack(
        [torch.cat([stored[f"{name}.{e}"][rows] for name in ("gate", "up")]) for e in units.get("experts", range(4))]
    )
    lowered = lower(GATE_UP, units=units)
    assert shape(lowered) == tuple(expected.shape)
    assert torch.equal(apply(lowered, stored), expected)


def test_units_that_do_not_follow_each_other() -> None:
    stored = tensors()
    made = apply(lower(Q, units={"q heads": [5, 6, 1, 1]}), stored)
    assert torch.equal(made, stored["q"].unflatten(0, (HEADS, DIM))[[5, 6, 1, 1]].flatten(0, 1))


def test_a_shard_along_the_input_axis() -> None:
    source = FromCheckpoint("out", (HIDDEN, Axis("q heads", HEADS, DIM)))
    stored = tensors()
    assert torch.equal(apply(lower(source, units={"q heads": [2]}), stored), stored["out"][:, 6:9])


def test_a_reshape_names_the_axes_of_a_split_or_interleaved_tensor() -> None:
    rows = HEADS * DIM
    for moved in (
        Split(FromCheckpoint("qkv", (3 * rows, HIDDEN)), rows, rows),
        Interleave(FromCheckpoint("w", (rows, HIDDEN)), 2),
    ):
        stored = {"qkv": torch.randn(3 * rows, HIDDEN), "w": torch.randn(rows, HIDDEN)}
        named = Permute(Reshape(moved, (Axis("q heads", HEADS), DIM, HIDDEN)), (1, 0, 2))
        whole = apply(named, stored)
        assert torch.equal(apply(lower(named, units={"q heads": [1, 2]}), stored), whole[:, 1:3])


def test_only_the_needed_rows_of_a_shard_are_read() -> None:
    lowered = lower(Concat((Q, K, V)), units={"q heads": [7], "kv heads": [1]})
    regions = {part.name: part.region for part in needs(lowered, full(shape(lowered)))}
    assert regions == {"q": ((21, 24), (0, 5)), "k": ((3, 6), (0, 5)), "v": ((3, 6), (0, 5))}


def test_shares_that_cannot_be_dealt_out() -> None:
    with pytest.raises(UsageError, match=r"8 q heads cannot be dealt out to 3 ranks\. Sizes that fit: \[1, 2, 4, 8\]"):
        share(Axis("q heads", 8), 0, 3)
    with pytest.raises(UsageError, match="2 q heads"):
        share(Axis("q heads", 2), 0, 4)
    assert share(Axis("kv heads", 2, replicable=True), 3, 4) == range(1, 2)
    with pytest.raises(UsageError, match="3 kv heads"):
        share(Axis("kv heads", 3, replicable=True), 0, 4)


def test_operations_that_would_mix_shards_are_refused() -> None:
    for source in (Split(Q, 0, 12), Interleave(Q, 2)):
        lower(source)
        with pytest.raises(PluginError, match="name it above"):
            lower(source, units={"q heads": [0]})
    with pytest.raises(PluginError, match=r"loses the shared axes \['q heads'\]"):
        lower(Reshape(Q, (HEADS, DIM, HIDDEN)), units={"q heads": [0]})
