"""Mistakes in single parameters: left out, twice, rounded, turned round; and parameters of ours that differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from rtp_runtime.check.causes import patching
from rtp_runtime.check.causes.hypothesis import Hypothesis
from rtp_runtime.check.causes.operations import innocent
from rtp_runtime.check.causes.scene import Scene

MOST_TAPS = 16
"""A last dimension of at most so many is a convolution's or a table's, and may be flipped."""


def parameter_mistakes(scene: Scene) -> Iterator[Hypothesis]:
    """Each parameter and table of the accused module, and of those in it that are not cleared."""
    clean = innocent(scene)
    for name, module in scene.children():
        if name in clean:
            continue
        held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for key, value in held:
            if value.is_floating_point() and value.numel():
                yield from _mistakes(scene, module, f"{name}.{key}", key, value)


@dataclass(frozen=True, slots=True)
class _Wrong:
    """Another value of a parameter, and what it would mean."""

    kind: str
    words: str
    fix: str
    value: Tensor
    cost: float


def _mistakes(scene: Scene, module: nn.Module, name: str, key: str, value: Tensor) -> Iterator[Hypothesis]:
    where = scene.wheres()
    for wrong in (*_as_vector(name, key, value, where), *_as_matrix(name, value, where)):
        yield Hypothesis(
            kind=wrong.kind,
            words=wrong.words,
            fix=wrong.fix,
            mistake=partial(patching.tensor, module, key, wrong.value),
            cost=wrong.cost,
        )


def _as_vector(name: str, key: str, value: Tensor, where: str) -> Iterator[_Wrong]:
    """What is done with biases, and with vectors that are added, multiplied, or scores."""
    bias = "bias" in key
    what, use = ("bias" if bias else "parameter"), f"apply {key} in {where}"
    if value.ndim <= 2 and (bias or value.ndim == 1):
        yield _Wrong(f"{what}-left-out", f"ours leaves out {name}", use, torch.zeros_like(value), 0.5 if bias else 1.0)
        yield _Wrong(f"{what}-twice", f"ours applies {name} twice", f"{use} once", 2 * value, 1.0)
        yield _Wrong(f"{what}-sign", f"ours has the other sign of {name}", f"turn the sign in {where}", -value, 1.3)
    if value.ndim == 1 and not bias:
        kind = "sinks-left-out" if "sink" in key else "parameter-left-out"
        yield _Wrong(kind, f"ours leaves out {name}", use, torch.full_like(value, -torch.inf), 1.1)
        yield _Wrong("parameter-left-out", f"ours leaves out {name}", use, torch.ones_like(value), 1.1)
        yield _Wrong("order", f"ours has {name} in reverse order", f"its layout in {where}", value.flip(0), 1.3)


def _as_matrix(name: str, value: Tensor, where: str) -> Iterator[_Wrong]:
    """Layouts, and rounding."""
    fix = f"the weight descriptor of {name}, or how {where} reads it"
    if value.ndim > 1 and 1 < value.shape[-1] <= MOST_TAPS:
        yield _Wrong("conv-flipped", f"ours has the taps of {name} in the opposite order", fix, value.flip(-1), 1.0)
    if value.ndim > 1 and value.shape[-1] == value.shape[-2]:
        turned = value.transpose(-1, -2).contiguous()
        yield _Wrong("transposed", f"ours has {name} transposed", fix, turned, 1.0)
    for by in (1, -1) if value.shape[0] > 1 else ():
        words = f"ours has {name} shifted by {by} along its first dimension"
        yield _Wrong("shifted", words, fix, value.roll(by, 0), 1.3)
    rounded = value.bfloat16().to(value.dtype)
    if not torch.equal(rounded, value):
        words = f"ours rounds {name} to bfloat16; the reference keeps it in float32"
        yield _Wrong("precision", words, f'dtype="float32" in the weight descriptor of {name}', rounded, 1.2)
