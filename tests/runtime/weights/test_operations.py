"""Every operation and composition: shape, apply, invert and needs agree with each other and with torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rtp_runtime.errors import NotJudgedError, PluginError
from rtp_runtime.weights import Axis, Concat, FromCheckpoint, Interleave, Permute, Reshape, Source, Split, Stack
from rtp_runtime.weights.lowering import lower
from rtp_runtime.weights.operations import Slice, apply, cut, invert, needs, output, shape
from rtp_runtime.weights.outputs import split_output
from rtp_runtime.weights.regions import Region, extents

Draw = Callable[[st.SearchStrategy[Any]], Any]
small = st.integers(1, 4)
MAX_STACK = 3


class Trees:
    """Draws trees; leaves get names of their own, with a field for each stack they stand under."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.made: list[tuple[FromCheckpoint, tuple[str, ...]]] = []

    def leaf(self, dims: tuple[int, ...], fields: tuple[str, ...]) -> FromCheckpoint:
        name = f"t{len(self.made)}" + "".join(f".{{{field}}}" for field in fields)
        self.made.append((FromCheckpoint(name, dims), fields))
        return self.made[-1][0]

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """A tensor for every leaf under every number of its stacks, all elements different."""
        tensors, first = {}, 0
        for leaf, fields in self.made:
            for values in itertools.product(range(MAX_STACK), repeat=len(fields)):
                size = math.prod(leaf.dims)
                name = leaf.name.format(**dict(zip(fields, values, strict=True)))
                tensors[name] = torch.arange(first, first + size, dtype=torch.float64).view(leaf.dims)
                first += size
        return tensors

    def tree(self, depth: int, fields: tuple[str, ...] = ()) -> Source:
        """A source of any shape."""
        kinds = ["leaf", "concat", "stack", "split", "permute", "interleave", "reshape"]
        kind = self.draw(st.sampled_from(kinds if depth else ["leaf"]))
        if kind == "leaf":
            return self.leaf(tuple(self.draw(st.lists(small, min_size=1, max_size=3))), fields)
        if kind == "stack":
            field = f"f{len(fields)}"
            return Stack(
                self.tree(depth - 1, (*fields, field)), field, Axis("experts", self.draw(st.integers(1, MAX_STACK)))
            )
        part = self.tree(depth - 1, fields)
        made = shape(part)
        dim = self.draw(st.integers(0, len(made) - 1))
        if kind == "concat":
            return self.concat(part, dim, fields)
        if kind == "split":
            start = self.draw(st.integers(0, made[dim] - 1))
            return Split(part, start, self.draw(st.integers(1, made[dim] - start)), dim)
        if kind == "permute":
            return Permute(part, tuple(self.draw(st.permutations(range(len(made))))))
        if kind == "interleave":
            return Interleave(part, self.draw(st.sampled_from(divisors(made[dim]))), dim)
        return Reshape(part, self.factors(math.prod(made)))

    def concat(self, part: Source, dim: int, fields: tuple[str, ...]) -> Source:
        parts = [part]
        for _ in range(self.draw(st.integers(1, 2))):
            made = list(shape(part))
            made[dim] = self.draw(small)
            dressed = Reshape(self.leaf((math.prod(made),), fields), tuple(made))
            parts.append(self.draw(st.sampled_from([self.leaf(tuple(made), fields), dressed])))
        return Concat(tuple(self.draw(st.permutations(parts))), dim)

    def factors(self, number: int) -> tuple[int, ...]:
        dims = []
        for _ in range(self.draw(st.integers(0, 3))):
            dims.append(self.draw(st.sampled_from(divisors(number))))
            number //= dims[-1]
        return (*dims, number)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def where(leaf: Slice) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in leaf.region)


def draw_region(data: st.DataObject, dims: tuple[int, ...]) -> Region:
    starts = [data.draw(st.integers(0, size - 1)) for size in dims]
    return tuple((start, data.draw(st.integers(start + 1, size))) for start, size in zip(starts, dims, strict=True))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_operation_and_composition(data: st.DataObject) -> None:
    trees = Trees(data.draw)
    tree = trees.tree(depth=4)
    tensors = trees.checkpoint()
    lowered = lower(tree)
    expected = apply(tree, tensors)

    assert shape(tree) == shape(lowered) == tuple(expected.shape)
    assert torch.equal(apply(lowered, tensors), expected)
    assert output(lowered, dict.fromkeys(tensors, "bfloat16")) == (tuple(expected.shape), "bfloat16")

    written = torch.full(expected.shape, math.nan, dtype=torch.float64)
    for leaf, view in invert(lowered, written):
        view.copy_(tensors[leaf.name][where(leaf)])
    assert torch.equal(written, expected)

    back = list(invert(lowered, expected))
    assert all(torch.equal(view, tensors[leaf.name][where(leaf)]) for leaf, view in back)
    assert sum(view.numel() for _, view in back) == expected.numel()

    region = draw_region(data, tuple(expected.shape))
    needed = needs(lowered, region)
    assert sum(math.prod(extents(part.region)) for part in needed) == math.prod(extents(region))
    only = {name: torch.full_like(tensor, math.nan) for name, tensor in tensors.items()}
    for part in needed:
        only[part.name][where(part)] = tensors[part.name][where(part)]
    assert torch.equal(apply(cut(lowered, region), only), expected[tuple(slice(*bounds) for bounds in region)])


def test_apply_is_what_torch_does() -> None:
    q, k, v = torch.arange(12.0).view(6, 2), torch.arange(12.0, 20).view(4, 2), torch.arange(20.0, 28).view(4, 2)
    tensors = {"q": q, "k": k, "v": v}
    leaves_ = {name: FromCheckpoint(name, tuple(tensor.shape)) for name, tensor in tensors.items()}
    fused = Concat(tuple(leaves_.values()))
    assert torch.equal(apply(fused, tensors), torch.cat([q, k, v]))
    assert torch.equal(apply(Permute(leaves_["q"], (1, 0)), tensors), q.T)
    assert torch.equal(apply(Interleave(leaves_["q"], 2), tensors), q[[0, 3, 1, 4, 2, 5]])
    assert torch.equal(apply(Split(fused, 6, 4), tensors), k)
    assert torch.equal(apply(Reshape(leaves_["q"], (2, 3, 2)), tensors), q.view(2, 3, 2))
    experts = Stack(FromCheckpoint("e{expert}", (6, 2)), "expert", Axis("experts", 2))
    assert torch.equal(apply(experts, {"e0": q, "e1": q + 1}), torch.stack([q, q + 1]))


@pytest.mark.parametrize(
    "source",
    [
        Concat(()),
        Concat((FromCheckpoint("a", (2, 3)), FromCheckpoint("b", (2, 4)))),
        Concat((FromCheckpoint("a", (2, 3)), FromCheckpoint("b", (2,)))),
        Split(FromCheckpoint("a", (4, 3)), 2, 3),
        Split(FromCheckpoint("a", (4, 3)), 0, 0),
        Permute(FromCheckpoint("a", (4, 3)), (0, 0)),
        Interleave(FromCheckpoint("a", (4, 3)), 3),
        Reshape(FromCheckpoint("a", (4, 3)), (5, 2)),
        FromCheckpoint("a.{layer}", (4, 3)),
    ],
    ids=lambda source: type(source).__name__,
)
def test_descriptors_that_do_not_fit_together(source: Source) -> None:
    with pytest.raises(PluginError):
        lower(source)


def test_output_dtype_holds_all_parts() -> None:
    parts = lower(Concat((FromCheckpoint("a", (2,)), FromCheckpoint("b", (2,)))))
    assert output(parts, {"a": "bfloat16", "b": "bfloat16"})[1] == "bfloat16"
    assert output(parts, {"a": "bfloat16", "b": "float32"})[1] == "float32"
    assert output(parts, {"a": "bfloat16", "b": "float16"})[1] == "float32"


def test_split_output_of_a_fused_linear() -> None:
    torch.manual_seed(0)
    shapes = {"q": (8, 5), "k": (4, 5), "v": (4, 5)}
    weights = {name: torch.randn(dims) for name, dims in shapes.items()}
    x = torch.randn(2, 3, 5)
    leaf = {name: FromCheckpoint(name, dims) for name, dims in shapes.items()}
    per_head = [Reshape(leaf[name], (2, -(-dims[0] // 2), 5)) for name, dims in shapes.items()]
    forms = {
        "joined": Concat(tuple(leaf.values())),
        "by head": Reshape(Concat(tuple(per_head), 1), (16, 5)),
        "interleaved": Concat((Interleave(leaf["q"], 2), leaf["v"], leaf["k"])),
        "transposed": Permute(Concat(tuple(Permute(part, (1, 0)) for part in leaf.values()), 1), (1, 0)),
    }
    for form, source in forms.items():
        split = split_output(lower(source), x @ apply(source, weights).T)
        assert split.keys() == weights.keys(), form
        for name, weight in weights.items():
            torch.testing.assert_close(split[name], x @ weight.T, msg=form)


def test_split_output_of_a_bias() -> None:
    source = lower(Concat((FromCheckpoint("q", (3,)), FromCheckpoint("k", (2,)))))
    split = split_output(source, torch.arange(5.0))
    assert split["q"].tolist() == [0, 1, 2] and split["k"].tolist() == [3, 4]


def test_split_output_refuses_what_cannot_be_told_apart() -> None:
    wide = lower(Concat((FromCheckpoint("a", (4, 2)), FromCheckpoint("b", (4, 3))), 1))
    with pytest.raises(NotJudgedError, match="add up"):
        split_output(wide, torch.zeros(2, 4))
    with pytest.raises(NotJudgedError, match="not that of a linear"):
        split_output(wide, torch.zeros(2, 5))
    stacked = lower(Stack(FromCheckpoint("e{expert}", (4, 2)), "expert", Axis("experts", 2)))
    with pytest.raises(NotJudgedError):
        split_output(stacked, torch.zeros(3, 2))
