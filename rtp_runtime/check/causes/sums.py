"""Mistakes in sums and scales: our output is the reference's, plus a multiple of something that stands near it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from rtp_runtime.check.causes import patching
from rtp_runtime.check.causes.evidence import Pairs
from rtp_runtime.check.causes.hypothesis import Fit, Hypothesis
from rtp_runtime.check.causes.judge import left_at_most
from rtp_runtime.check.causes.scene import Scene
from rtp_runtime.check.names import parent_of
from rtp_runtime.check.probe_table import INPUT, OUTPUT, ProbeKey

NEAR = 2e-4
"""A factor this near to a round number is it."""


def sum_mistakes(scene: Scene, count: int) -> Iterator[Hypothesis]:
    """As many parts as are said, with other factors."""
    pairs = scene.evidence.pairs(scene.key, scene.base, scene.layer)
    if pairs is None or len(pairs) != 1 or scene.key.what not in (OUTPUT, INPUT):
        return
    error, size, parts = _error(pairs), float(pairs[0][1].norm()), _parts(scene, pairs)
    allowed = left_at_most(scene.error, scene.tolerance())
    for names in itertools.combinations(parts, count):
        basis = torch.stack([parts[name].flatten() for name in names], dim=1).double()
        factors = torch.linalg.lstsq(basis, error.double()[:, None]).solution[:, 0]
        left = float((error.double() - basis @ factors).norm()) / size
        if left <= allowed:
            values = [_round(float(value)) for value in factors]
            yield _hypothesis(scene, dict(zip(names, values, strict=True)), parts)
            return


def _error(pairs: Pairs) -> Tensor:
    ours, theirs = pairs[0]
    return (ours - theirs).flatten()


def _parts(scene: Scene, pairs: Pairs) -> dict[str, Tensor]:
    """What may be summed, by name: the output itself, the input, and what modules in and beside it give."""
    wanted = pairs[0][1]
    found = {"": wanted}
    name = scene.key.module
    call = scene.base.calls.get(name)
    if call is not None and call.inputs and scene.key.what == OUTPUT:
        _add(found, "its input", call.inputs[0], wanted)
    for other, call in scene.base.calls.items():
        near = other.startswith(f"{name}.") or (scene.layer_name or "?") == parent_of(other)
        if near and call.outputs and other != name and other not in scene.reference.layers:
            _add(found, other, call.outputs[0], wanted)
    layer = scene.layer_name
    if layer is not None and layer != name:
        _add(found, "the layer's input", scene.base.calls[layer].inputs[0], wanted)
    return found


def _add(found: dict[str, Tensor], name: str, tensor: Tensor, wanted: Tensor) -> None:
    flat = tensor.flatten(1).float() if tensor.ndim > 1 else tensor
    known = any(torch.equal(flat, other) for other in found.values() if other.shape == flat.shape)
    if flat.shape == wanted.shape and not known and bool(flat.any()):
        found[name] = flat


def _round(value: float) -> float:
    for digits in (1, 2, 3, 4):
        short = float(f"{value:.{digits}g}")
        if abs(short - value) <= NEAR * abs(value):
            return short
    return value


def _hypothesis(scene: Scene, factors: dict[str, float], parts: dict[str, Tensor]) -> Hypothesis:
    what = scene.finding.module
    words = " and ".join(_words(name, value, what, scene.key) for name, value in factors.items())
    added = sum(value * parts[name] for name, value in factors.items())
    module = scene.reference.modules[scene.key.module]

    def change(value: Tensor) -> Tensor:
        assert isinstance(added, Tensor)
        return value + added.reshape(value.shape)

    own = list(factors) == [""]
    kind = "scale" if own else "residual-scale" if "input" in next(iter(factors)) else "part-scale"
    if any(abs(value + 1.0) < NEAR for value in factors.values()) and not own:
        kind = "part-left-out"
    if scene.key.what == INPUT:
        return Hypothesis(
            kind="embedding-scale", words=words, fix=f"the scale of the embedding in {scene.wheres()}",
            mistake=lambda: patching.given(module, change), cost=1.0,
        )  # fmt: skip
    if own and _is_head(scene):
        kind = "logit-scale"
    if own and isinstance(module, nn.Embedding):
        kind = "embedding-scale"
    return Hypothesis(
        kind=kind, words=words, fix=f"the factors in the sum that {scene.wheres()} returns",
        mistake=lambda: patching.output(module, lambda given, args: patching.first_tensor(given, change)), cost=1.0,
    )  # fmt: skip


def _is_head(scene: Scene) -> bool:
    return scene.layer is None and scene.key.module == list(scene.base.calls)[-1]


def logit_mistakes(scene: Scene) -> Iterator[Hypothesis | Fit]:
    """A scale or cap of the logits that ours leaves out, and a cap that the reference does not have."""
    if not _is_head(scene):
        return
    config = scene.reference.config.get_text_config()
    for key in [key for key, value in vars(config).items() if "logit" in key and isinstance(value, (int, float))]:
        value = getattr(config, key)
        if not isinstance(value, bool) and value not in (0, 1):
            for other in (None, 1.0):
                yield Hypothesis(
                    kind="logit-scale",
                    words=f"ours leaves out {key} ({value:g}) of the logits",
                    fix=f"apply {key} in logits() of {scene.wheres()}",
                    mistake=partial(patching.attribute, config, key, other),
                )
    yield Fit(
        kind="logit-softcap",
        words="ours caps the logits at {}; the reference not",
        fix=f"no soft cap in logits() of {scene.wheres()}",
        mistake=partial(_capped, scene.reference.modules[scene.key.module]),
        right=1e6,
        tries=(30.0, 50.0, 15.0, 20.0),
        log=True,
    )


def _capped(module: nn.Module, cap: float) -> AbstractContextManager[None]:
    return patching.output(module, lambda given, args: cap * torch.tanh(given / cap))


def _words(name: str, value: float, module: str, key: ProbeKey) -> str:
    if name == "":
        what = "the embedding" if key.what == INPUT else f"the output of {module}"
        return f"ours multiplies {what} by {1 + value:.8g} once more than the reference"
    if abs(value + 1.0) < NEAR:
        return f"ours leaves out {name} in the sum that {module} gives"
    if abs(value - 1.0) < NEAR:
        return f"ours adds {name} once more to what {module} gives"
    return f"ours adds {value:.6g} times {name} more to what {module} gives"
