"""Mistakes in activations that stand as modules: another function in the place of the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from rtp_kernel.ops.activation import ACTIVATIONS
from rtp_runtime.alternatives import ACTIVATION_NAMES, alternatives_to
from rtp_runtime.check.causes import patching
from rtp_runtime.check.causes.hypothesis import Hypothesis
from rtp_runtime.check.causes.scene import Scene

SAME = 1e-6


def activation_mistakes(scene: Scene) -> Iterator[Hypothesis]:
    """Every other activation, for each module without parameters that is one."""
    for module, name in _found(scene):
        for other in alternatives_to(name):
            yield Hypothesis(
                kind="activation",
                words=f"ours applies {other} where the reference applies {name}",
                fix=f'use "{name}" in {scene.wheres()}, or the key of the config that says so (hidden_act)',
                mistake=partial(patching.forward, module, partial(_apply, name=other)),
                cost=0.9,
            )


def _apply(x: Tensor, *_: Any, name: str) -> Tensor:
    return ACTIVATIONS[name](x)


def _found(scene: Scene) -> list[tuple[nn.Module, str]]:
    """The activations in the accused module, by what they compute."""
    seen: dict[nn.Module, str] = {}

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if module in seen or not args or not isinstance(output, Tensor) or output.shape != args[0].shape:
            return
        for name in ACTIVATION_NAMES:
            if float((ACTIVATIONS[name](args[0]) - output).norm()) <= SAME * float(output.norm()):
                seen[module] = name
                return

    with ExitStack() as stack:
        for _, module in scene.children():
            if not list(module.parameters()) and not list(module.children()):
                stack.callback(module.register_forward_hook(hook).remove)
        scene.rerun.run()
    return list(seen.items())
