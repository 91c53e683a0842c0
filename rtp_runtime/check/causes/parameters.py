"""Mistakes in single parameters: left out, twice, rounded, turned round; and parameters of ours that differ."""

from __future__ import annotations

from collections.abc import Iterator

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


def _mistakes(scene: Scene, module: nn.Module, name: str, key: str, value: Tensor) -> Iterator[Hypothesis]:
    bias = "bias" in key
    what, where = ("bias" if bias else "parameter"), scene.wheres()
    made: list[tuple[str, str, str, Tensor, float]] = []
    if value.ndim <= 2 and (bias or value.ndim == 1):
        made.append((f"{what}-left-out", f"ours leaves out {name}", f"apply {key} in {where}, and load it",
                     torch.zeros_like(value), 0.5 if bias else 1.0))  # fmt: skip
        made.append((f"{what}-twice", f"ours adds {name} twice", f"apply {key} once in {where}", 2 * value, 1.0))
        made.append((f"{what}-sign", f"ours has the other sign of {name}", f"turn the sign in {where}", -value, 1.3))
    if value.ndim == 1 and not bias:
        words = f"ours leaves out {name}"
        made.append(("sinks-left-out" if "sink" in key else "parameter-left-out", words, f"apply {key} in {where}",
                     torch.full_like(value, -torch.inf), 1.1))  # fmt: skip
        made.append(("parameter-left-out", words, f"apply {key} in {where}", torch.ones_like(value), 1.1))
        made.append(("order", f"ours has {name} in reverse order", f"mend its layout in {where}", value.flip(0), 1.3))
    if value.ndim > 1 and 1 < value.shape[-1] <= MOST_TAPS:
        made.append(("conv-flipped", f"ours has the taps of {name} in the opposite order", f"flip it in {where}",
                     value.flip(-1), 1.0))  # fmt: skip
    if value.ndim > 1 and value.shape[-1] == value.shape[-2]:
        made.append(("transposed", f"ours has {name} transposed", f"the weight descriptor of {name}",
                     value.transpose(-1, -2).contiguous(), 1.0))  # fmt: skip
    if value.shape[0] > 1:
        for by in (1, -1):
            made.append(("shifted", f"ours has {name} shifted by {by} along its first dimension",
                         f"the weight descriptor of {name}, or how {where} reads it", value.roll(by, 0), 1.3))  # fmt: skip
    rounded = value.bfloat16().to(value.dtype)
    if not torch.equal(rounded, value):
        made.append(("precision", f"ours rounds {name} to bfloat16; the reference keeps it in float32",
                     f'declare it with dtype "float32" in the weight descriptors of {where}', rounded, 1.2))  # fmt: skip
    for kind, words, fix, tensor, cost in made:
        yield Hypothesis(
            kind=kind, words=words, fix=fix, cost=cost,
            mistake=lambda tensor=tensor: patching.tensor(module, key, tensor),
        )  # fmt: skip
