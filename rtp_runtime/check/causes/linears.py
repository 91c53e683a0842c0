"""Mistakes in projections: fused parts in another order or interleave, rows permuted, experts and their halves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rtp_runtime.alternatives import describe_order, packings, pair_packings
from rtp_runtime.check.causes import patching
from rtp_runtime.check.causes.hypothesis import Hypothesis
from rtp_runtime.check.causes.scene import Scene
from rtp_runtime.check.names import parent_of
from rtp_runtime.check.probe_table import ProbeKey

MOST_ROWS = 16384
SAME_COLUMN = 1e-5
LAYOUT = "the layout of the fused weight in the weight descriptors, or how {where} splits it"


def linear_mistakes(scene: Scene) -> Iterator[Hypothesis]:
    """The accused projection with those that take the same input; and fused expert weights."""
    names = _siblings(scene)
    if names:
        yield from _packings(scene, names)
        yield from _matched_rows(scene, names)
    yield from _experts(scene)


def _siblings(scene: Scene) -> list[str]:
    """Projections that are given what the accused one is given, as declared; none if it is no projection."""
    calls, own = scene.base.calls, scene.module_name
    if own not in calls or not _is_linear(scene.module) or not calls[own].inputs:
        return []
    x = calls[own].inputs[0]

    def takes_it(name: str) -> bool:
        module = scene.reference.modules[name]
        given = calls[name].inputs
        return _is_linear(module) and bool(given) and given[0].shape == x.shape and torch.equal(given[0], x)

    inside = [name for name in scene.reference.modules if name in calls and parent_of(name) == parent_of(own)]
    return [name for name in inside if takes_it(name)]


def _is_linear(module: nn.Module) -> bool:
    weight: Any = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) or (weight is not None and weight.ndim == 2 and hasattr(module, "nf"))


def _packings(scene: Scene, names: Sequence[str]) -> Iterator[Hypothesis]:
    """Named orders of q, k, v and of two parts of one size."""
    where = LAYOUT.format(where=scene.wheres())
    attention = scene.base.attention.get(parent_of(names[0]))
    rows = {name: _rows(scene, name) for name in names}
    if attention is not None and len(names) >= 3:
        heads, dim = attention.q.shape[1:]
        kv_heads, v_dim = attention.k.shape[1], attention.v.shape[2]
        sizes = [heads * dim, kv_heads * dim, kv_heads * v_dim]
        trio = list(names[:3])
        if [rows[name] for name in trio] == sizes:
            for packing in list(packings(heads, kv_heads, dim, v_dim))[1:]:
                for order in (packing.order, packing.inverse):
                    yield Hypothesis(
                        kind="qkv-layout",
                        words=f"ours takes the fused q, k, v in another layout: {packing.words}",
                        fix=where,
                        mistake=partial(permuted, scene, trio, order),
                        cost=1.0,
                    )
    for pair in itertools.pairwise(names):
        if rows[pair[0]] == rows[pair[1]] and (len(names) == 2 or attention is None):
            for packing in list(pair_packings(rows[pair[0]]))[1:]:
                for order in (packing.order, packing.inverse):
                    yield Hypothesis(
                        kind="gate-up-layout",
                        words=f"ours takes the fused {' and '.join(p.rpartition('.')[2] for p in pair)} in another "
                        f"layout: {packing.words}",
                        fix=where,
                        mistake=partial(permuted, scene, pair, order),
                        cost=1.0,
                    )


def _rows(scene: Scene, name: str) -> int:
    return int(scene.base.calls[name].outputs[0].flatten(1).shape[1])


@contextmanager
def permuted(
    scene: Scene, names: Sequence[str], order: Tensor, fields: Sequence[str] = ("weight", "bias")
) -> Iterator[None]:
    """The outputs of these modules, laid end to end, in another order; with `fields` the weights' alone."""
    modules = [scene.reference.modules[name] for name in names]
    with ExitStack() as stack:
        for field in fields:
            held = [getattr(module, field, None) for module in modules]
            if all(value is None for value in held):
                continue
            # Some projections hold their weight as [in, out].
            turned = field == "weight" and not all(isinstance(module, nn.Linear) for module in modules)
            values = [_filled(value, scene, name) for value, name in zip(held, names, strict=True)]
            values = [value.T if turned else value for value in values]
            parts = torch.split(torch.cat(values)[order], [len(value) for value in values])
            for module, old, part in zip(modules, held, parts, strict=True):
                if old is not None:
                    stack.enter_context(patching.tensor(module, field, (part.T if turned else part).contiguous()))
        yield


def _filled(value: Tensor | None, scene: Scene, name: str) -> Tensor:
    return torch.zeros(_rows(scene, name)) if value is None else value.detach()


def _matched_rows(scene: Scene, names: Sequence[str]) -> Iterator[Hypothesis]:
    """Which of the reference's rows each of ours is, read off the numbers."""
    kept = [name for name in names if ProbeKey(name) in scene.evidence.kept]
    pairs = {name: scene.evidence.pairs(ProbeKey(name), scene.base, scene.layer) for name in kept}
    if any(found is None or len(found) != 1 for found in pairs.values()) or scene.module_name not in kept:
        return
    ours = torch.cat([pairs[name][0][0] for name in kept], dim=1)  # type: ignore[index]
    theirs = torch.cat([pairs[name][0][1] for name in kept], dim=1)  # type: ignore[index]
    if ours.shape != theirs.shape or ours.shape[1] > MOST_ROWS or len(ours) < 4 or not bool(ours.isfinite().all()):
        return
    held: list[Any] = [getattr(scene.reference.modules[name], "bias", None) for name in kept]
    bias = torch.cat([_filled(value, scene, name) for value, name in zip(held, kept, strict=True)])
    attention = scene.base.attention.get(parent_of(names[0]))
    heads = (attention.q.shape[1], attention.k.shape[1]) if attention is not None else ()
    sizes = [_rows(scene, name) for name in kept]
    for fields, taken in ((("weight", "bias"), 0 * bias), (("weight",), bias)):
        order = _order_of(ours - taken, theirs - taken)
        if order is not None and not torch.equal(order, torch.arange(len(order))):
            told = describe_order(order.tolist(), heads) or _words_of_order(order, kept, sizes, heads)
            yield Hypothesis(
                kind="qkv-layout" if len(kept) >= 3 and attention is not None else "row-order",
                words=f"ours has the rows of the reference's {', '.join(n.rpartition('.')[2] for n in kept)} "
                f"({' and '.join(fields)}) in another order: {told}",
                fix=LAYOUT.format(where=scene.wheres()),
                mistake=partial(permuted, scene, kept, order, fields),
                cost=1.5,
            )
            return


def _order_of(ours: Tensor, theirs: Tensor) -> Tensor | None:
    """[columns]: which column of theirs each of ours is; None if any is none of them."""
    lengths = theirs.norm(dim=0)
    found = []
    for place in range(0, ours.shape[1], 512):
        part = ours[:, place : place + 512]
        # |a - b|^2 = |a|^2 - 2 a b + |b|^2, least where the two are one
        gap = part.square().sum(0)[:, None] - 2 * part.T @ theirs + lengths.square()[None]
        found.append(gap.argmin(dim=1))
    order = torch.cat(found)
    left = (ours - theirs[:, order]).norm(dim=0)
    near = left <= SAME_COLUMN * lengths[order].clamp_min(float(lengths.mean()) * 1e-2)
    return order if bool(near.all()) else None


def _words_of_order(order: Tensor, names: Sequence[str], sizes: Sequence[int], heads: Sequence[int]) -> str:
    parts, start = [], 0
    for name, size in zip(names, sizes, strict=True):
        own = order[start : start + size] - start
        short = name.rpartition(".")[2]
        if bool((own < 0).any() or (own >= size).any()):
            ends = torch.tensor(sizes).cumsum(0)
            sources = torch.bucketize(order[start : start + size], ends, right=True).tolist()
            parts.append(
                f"{short} is made of rows of {', '.join(names[i].rpartition('.')[2] for i in sorted(set(sources)))}"
            )
        elif not torch.equal(own, torch.arange(size)):
            told = describe_order(own.tolist(), heads)
            moved = int((own != torch.arange(size)).sum())
            parts.append(f"{short}: {told or f'{moved} of {size} rows stand elsewhere'}")
        start += size
    return "; ".join(parts)


def _experts(scene: Scene) -> Iterator[Hypothesis]:
    """Fused weights of experts [experts, rows, columns]: other orders of experts and of their halves."""
    for name, module in scene.children():
        held = {key: p for key, p in module.named_parameters(recurse=False) if p.ndim == 3}
        if held:
            yield from _expert_orders(scene, name, module, held)
            for key in held:
                yield from _expert_halves(scene, name, module, key)


def _expert_orders(scene: Scene, name: str, module: nn.Module, held: dict[str, nn.Parameter]) -> Iterator[Hypothesis]:
    count = next(iter(held.values())).shape[0]
    orders = {
        "each expert takes the next one's weights": torch.arange(count).roll(-1),
        "each expert takes the one's before": torch.arange(count).roll(1),
        "they stand in reverse order": torch.arange(count).flip(0),
    }
    for words, order in orders.items():
        yield Hypothesis(
            kind="expert-order",
            words=f"ours has the experts of {name} in another order: {words}",
            fix=f"the {{expert}} of the weight descriptor, or the ids in {scene.wheres()}",
            mistake=partial(_all, module, held, order),
            cost=1.0,
        )


def _expert_halves(scene: Scene, name: str, module: nn.Module, key: str) -> Iterator[Hypothesis]:
    value = getattr(module, key).detach()
    for dim in (dim for dim in (1, 2) if value.shape[dim] % 2 == 0):
        for packing in list(pair_packings(value.shape[dim] // 2))[1:]:
            for order in (packing.order, packing.inverse):
                yield Hypothesis(
                    kind="gate-up-layout",
                    words=f"ours takes the fused rows of {name}.{key} in another layout: {packing.words}",
                    fix=LAYOUT.format(where=scene.wheres()),
                    mistake=partial(patching.tensor, module, key, value.index_select(dim, order)),
                    cost=1.0 if "gate" in key else 1.3,
                )


@contextmanager
def _all(module: nn.Module, held: dict[str, nn.Parameter], order: Tensor) -> Iterator[None]:
    with ExitStack() as stack:
        for key, value in held.items():
            stack.enter_context(patching.tensor(module, key, value.detach()[order]))
        yield
