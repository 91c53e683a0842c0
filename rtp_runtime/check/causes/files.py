"""Mistakes in files: what our checkpoint's config and tensors say differently from the reference's, one by one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rtp_runtime.alternatives import describe_order, pair_packings
from rtp_runtime.check.causes import patching
from rtp_runtime.check.causes.hypothesis import Hypothesis
from rtp_runtime.check.causes.scene import Scene
from rtp_runtime.check.loading import eager, load_reference, quiet_transformers
from rtp_runtime.check.names import layer_of, parent_of
from rtp_runtime.check.reference import Reference

LARGEST = 500_000_000
"""Parameters of the largest model that is loaded once more."""
IGNORED = frozenset({"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache"})
NEAR = 1e-5


def file_mistakes(scene: Scene) -> Iterator[Hypothesis]:
    """Differences of the two checkpoints, if there are two; and parameters that are ours by name and differ."""
    session = scene.session
    if session.options.reference is not None and scene.reference.num_parameters <= LARGEST:
        yield from _config_mistakes(scene, session.options.model, session.options.reference)
        yield from _tensor_mistakes(scene)
    yield from _own_parameters(scene)


def config_differences(ours: Path, theirs: Path) -> list[tuple[tuple[str, ...], Any, Any]]:
    """(path, our value, their value) of the keys that decide numbers and differ."""
    one, other = (json.loads((path / "config.json").read_text(encoding="utf-8")) for path in (ours, theirs))
    return list(_differences(one, other, ()))


def _differences(
    one: Mapping[str, Any], other: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    for key in dict.fromkeys((*one, *other)):
        a, b = one.get(key), other.get(key)
        if a == b or key in IGNORED:
            continue
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _differences(a, b, (*path, key))
        else:
            yield (*path, key), a, b


def _config_mistakes(scene: Scene, ours: Path, theirs: Path) -> Iterator[Hypothesis]:
    differing = config_differences(ours, theirs)
    parents = dict.fromkeys(path[:-1] for path, *_ in differing if len(path) > 1)
    groups = [[each for each in differing if each[0][:-1] == parent] for parent in parents]
    sets = [[each] for each in differing] + [group for group in groups if len(group) > 1]
    for changed in [*sets, *([differing] if differing not in sets else [])]:
        other = _with_config(scene.reference, theirs, changed)
        if other is None:
            continue
        other.use_names(scene.reference.naming)
        told = "; ".join(f"{path[-1]} is {_told(a)}, in the reference's {_told(b)}" for path, a, b in changed)
        keys = ", ".join(".".join(path) for path, *_ in changed)
        yield Hypothesis(
            kind=_config_kind([path for path, *_ in changed]),
            words=f"the configs differ: in our config.json {told}",
            fix=f"{keys} in config.json (or the default that stands for it)",
            other=other, cost=0.1 * len(changed),
        )  # fmt: skip


def _config_kind(paths: list[tuple[str, ...]]) -> str:
    if len(paths) == 1:
        return f"config-{paths[0][-1]}"
    parents = {path[:-1] for path in paths}
    parent = parents.pop() if len(parents) == 1 else ()
    return f"config-{parent[-1]}" if parent else "config"


def _told(value: Any) -> str:
    text = "missing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _with_config(reference: Reference, path: Path, changed: list[tuple[tuple[str, ...], Any, Any]]) -> Reference | None:
    """The reference's weights under a config with our values; None where they do not fit."""
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    for place, ours, _ in changed:
        target = values
        for key in place[:-1]:
            target = target[key]
        if ours is None:
            target.pop(place[-1], None)
        else:
            target[place[-1]] = ours
    try:
        with quiet_transformers():
            config = type(reference.config).from_dict(copy.deepcopy(values))
            model = type(reference.model).from_pretrained(
                str(path), config=config, dtype=torch.float32, local_files_only=True, use_safetensors=True,
                **eager(type(reference.model)),
            )  # fmt: skip
    except Exception:
        # Any value may be one that transformers cannot build a model of.
        return None
    return Reference(path, model.eval().requires_grad_(False))


def _tensor_mistakes(scene: Scene) -> Iterator[Hypothesis]:
    """Tensors of our checkpoint, read as the reference reads them, that differ from its own."""
    try:
        loaded = load_reference(scene.session.options.model)
    except Exception:
        # Our checkpoint need not be one that transformers can load.
        return
    loaded.use_names(scene.reference.naming)
    theirs, ours = (_tensors(reference) for reference in (scene.reference, loaded))
    differing = {
        name: value
        for name, value in ours.items()
        if name in theirs and theirs[name].shape == value.shape and not torch.equal(theirs[name], value)
    }
    near = {name: value for name, value in differing.items() if _is_near(scene, name)}
    sets = [{name: value} for name, value in near.items()] + ([near] if len(near) > 1 else [])
    for chosen in sets:
        told = "; ".join(_tell(name, value, theirs) for name, value in list(chosen.items())[:3])
        yield Hypothesis(
            kind=_kind_of(chosen, theirs), words=f"the checkpoints differ: {told}",
            fix=f"{', '.join(list(chosen)[:3])} in our checkpoint",
            mistake=partial(_with_tensors, scene, chosen), cost=0.2 * len(chosen),
        )  # fmt: skip


def _tensors(reference: Reference) -> dict[str, Tensor]:
    held: dict[str, Tensor] = {}
    for name, module in reference.modules.items():
        for key, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if key not in module._non_persistent_buffers_set:
                held[f"{name}.{key}"] = value.detach()
    return held


def _is_near(scene: Scene, name: str) -> bool:
    layer = layer_of(name, scene.reference.layers)
    return layer is None or layer == scene.layer


@contextmanager
def _with_tensors(scene: Scene, chosen: Mapping[str, Tensor]) -> Iterator[None]:
    with ExitStack() as stack:
        for name, value in chosen.items():
            module = scene.reference.modules[parent_of(name)]
            stack.enter_context(patching.tensor(module, name.rpartition(".")[2], value))
        yield


def _own_parameters(scene: Scene) -> Iterator[Hypothesis]:
    """Parameters of the same name and shape in our loaded model that hold other values."""
    ours: dict[str, Any] = {**dict(scene.session.model.module.named_parameters())}
    theirs = _tensors(scene.reference)
    for name, value in theirs.items():
        mine = ours.get(name)
        if mine is None or mine.is_meta or mine.shape != value.shape or not _is_near(scene, name):
            continue
        if scene.session.options.reference is None and not torch.equal(mine.detach().float(), value.float()):
            held = {name: mine.detach().to(value.dtype)}
            yield Hypothesis(
                kind=_kind_of(held, theirs),
                words=f"our loaded parameter differs: {_tell(name, held[name], theirs)}",
                fix=f"the weight descriptor of {name}, or what {scene.wheres()} does with it after loading",
                mistake=partial(_with_tensors, scene, held), cost=0.3,
            )  # fmt: skip


def _relation(value: Tensor, wanted: Tensor, theirs: Mapping[str, Tensor]) -> tuple[str, str]:
    """(kind, words) of how a tensor of ours comes from the reference's."""
    if not value.any():
        return "tensor-zeroed", "is all zeros"
    same = next(
        (n for n, t in theirs.items() if t.shape == value.shape and t is not wanted and torch.equal(t, value)), None
    )
    if same is not None:
        return "tensors-exchanged", f"is the reference's {same}"
    ratio = float((value * wanted).sum() / wanted.square().sum())
    if _close(value, ratio * wanted):
        return "tensor-scaled", f"is {ratio:.7g} times the reference's"
    if value.ndim > 1 and value.shape[0] == value.shape[1] and torch.equal(value, wanted.transpose(0, 1)):
        return "transposed", "is the reference's transposed"
    for packing in _halves(value, wanted):
        return "gate-up-layout", f"is the reference's with the two halves of its rows in another layout: {packing}"
    rows = value.reshape(len(value), -1) if value.ndim else value.reshape(1, 1)
    old = wanted.reshape(rows.shape)
    order = _permutation(rows, old)
    if order is not None:
        told = describe_order(order.tolist())
        moved = int((order != torch.arange(len(order))).sum())
        return (
            "row-order",
            f"has the reference's rows in another order: {told or f'{moved} of {len(order)} moved'}",
        )
    return _partial(rows, old)


def _halves(value: Tensor, wanted: Tensor) -> Iterator[str]:
    """Words for the layout of a fused tensor of experts [experts, rows, columns] whose halves stand otherwise."""
    for dim in (1, 2) if value.ndim == 3 else ():
        if value.shape[dim] % 2 == 0:
            for packing in list(pair_packings(value.shape[dim] // 2))[1:]:
                for order in (packing.order, packing.inverse):
                    if torch.equal(value, wanted.index_select(dim, order)):
                        yield packing.words


def _partial(rows: Tensor, old: Tensor) -> tuple[str, str]:
    """Where only some rows differ, or all."""
    changed = (rows != old).any(dim=1).nonzero().flatten().tolist()
    if torch.equal(rows, old.bfloat16().to(rows.dtype)):
        return "precision", "is the reference's rounded to bfloat16"
    if len(changed) == len(rows):
        added = rows - old
        if _close(added, added.mean() * torch.ones_like(added)):
            return "tensor-shifted", f"is the reference's plus {float(added.mean()):.6g}"
        return "tensor-differs", "holds other values throughout"
    told = ", ".join(map(str, changed[:4])) + (", …" if len(changed) > 4 else "")
    mine, theirs = rows[changed], old[changed]
    ratio = float((mine * theirs).sum() / theirs.square().sum().clamp_min(1e-30))
    if not mine.any():
        return "rows-zeroed", f"has zeros in {len(changed)} of {len(rows)} rows ({told})"
    if _close(mine, ratio * theirs):
        return "tensor-scaled", f"has {len(changed)} of {len(rows)} rows ({told}) times {ratio:.7g}"
    return "tensor-differs", f"differs in {len(changed)} of {len(rows)} rows ({told})"


def _permutation(rows: Tensor, old: Tensor) -> Tensor | None:
    """Which of the old rows each row is; None where some row is none of them, or nothing moved."""
    if not 1 < len(rows) <= 8192:
        return None
    known = {row.numpy().tobytes(): place for place, row in enumerate(old.contiguous())}
    found = [known.get(row.numpy().tobytes(), -1) for row in rows.contiguous()]
    order = torch.tensor(found)
    return (
        None if -1 in found or torch.equal(order, torch.arange(len(order))) or len(set(found)) < len(found) else order
    )


def _close(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= NEAR * float((other).norm()) and bool(torch.isfinite(one).all())


def _tell(name: str, value: Tensor, theirs: Mapping[str, Tensor]) -> str:
    return f"our {name} {_relation(value, theirs[name], theirs)[1]}"


def _kind_of(chosen: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str:
    kinds = {_relation(value, theirs[name], theirs)[0] for name, value in chosen.items()}
    return kinds.pop() if len(kinds) == 1 else "tensor-differs"
