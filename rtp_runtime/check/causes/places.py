"""Mistakes in places: what ours gives for one token is what the reference gives for another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rtp_runtime.check.causes import patching
from rtp_runtime.check.causes.hypothesis import Hypothesis
from rtp_runtime.check.causes.scene import Scene
from rtp_runtime.check.probe_table import OUTPUT

SAME = 1e-6


def place_mistakes(scene: Scene) -> Iterator[Hypothesis]:
    """Tables that were made for other positions; embeddings of other tokens; rows that stand one place off."""
    pairs = scene.evidence.pairs(scene.key, scene.base, scene.layer)
    if pairs is None or scene.key.what != OUTPUT or scene.key.module not in scene.reference.modules:
        return
    module = scene.reference.modules[scene.key.module]
    ours, theirs = (torch.cat([pair[side] for pair in pairs], dim=1) for side in (0, 1))
    places, index = _places(ours, theirs), scene.evidence.kept[scene.key].values()[1]
    table = any("inv_freq" in name for name, _ in module.named_buffers(recurse=False))
    if places is not None and not torch.equal(places, torch.arange(len(places))):
        moved = (places != torch.arange(len(places))).nonzero().flatten()
        first = int(moved[0])
        what = "positions" if table else "places"
        yield Hypothesis(
            kind=what,
            words=f"ours has for token {int(index[first])} what the reference has for token {int(index[places[first]])}"
            f" ({len(moved)} of {len(places)} tokens)",
            fix=f"the {what} that the engine or {scene.wheres()} feeds, across steps and chunks",
            mistake=lambda: patching.output(module, lambda given, args: _moved(given, index, places)),
            cost=0.5,
        )
    if isinstance(module, torch.nn.Embedding):
        yield from _other_tokens(scene, module, ours, index)


def _other_tokens(scene: Scene, module: torch.nn.Embedding, ours: Tensor, index: Tensor) -> Iterator[Hypothesis]:
    """Which tokens our embedding was given, read off its rows."""
    found = _places(ours, module.weight)
    ids = torch.tensor(scene.rerun.ids)[index]
    if found is None or torch.equal(found, ids):
        return
    first = int((found != ids).nonzero()[0])
    yield Hypothesis(
        kind="other-tokens",
        words=f"ours is given other token ids than the prompt's: {int(found[first])} for {int(ids[first])} at token "
        f"{int(index[first])} ({int((found != ids).sum())} of {len(ids)} tokens)",
        fix="the ids that the engine feeds again, in this mode",
        mistake=lambda: patching.output(module, lambda given, args: _put(given, index, module.weight[found])),
        cost=0.4,
    )


def _places(ours: Tensor, theirs: Tensor) -> Tensor | None:
    """[rows]: which row of theirs each of ours is; None if any is none of them."""
    if ours.shape[1:] != theirs.shape[1:] or not bool(ours.isfinite().all()):
        return None
    found = torch.cdist(ours.double(), theirs.double()).argmin(dim=1)
    gap = (ours - theirs[found]).norm()
    return found if float(gap) <= SAME * float(ours.norm()) else None


def _moved(given: Any, index: Tensor, places: Tensor) -> Any:
    if isinstance(given, Tensor):
        return _put(given, index, given[0, index[places]])
    return tuple(_moved(item, index, places) for item in given)


def _put(given: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    out = given.clone()
    out[0, index] = rows.to(out.dtype)
    return out
