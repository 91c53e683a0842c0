"""Mistakes in routing: renormalised or not, the correction bias in the weights, the choice made of other scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rtp_runtime.check.causes import patching
from rtp_runtime.check.causes.hypothesis import Fit, Hypothesis
from rtp_runtime.check.causes.scene import Scene

SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": partial(torch.softmax, dim=-1),
    "sqrtsoftplus": lambda logits: functional.softplus(logits).sqrt(),
}
"""What routers make of their logits."""


def router_mistakes(scene: Scene) -> Iterator[Hypothesis]:
    """Of modules that give the ids of experts and their weights."""
    where = scene.wheres()
    for name, module in _routers(scene):
        call = scene.base.calls[name]
        weights = _weights(call.outputs)
        assert weights is not None
        sums = weights.sum(-1, keepdim=True)
        if float((sums / sums.mean() - 1).abs().max()) > 1e-4:
            yield Hypothesis(
                kind="router-renormalise", words="ours divides the weights of the chosen experts by their sum",
                fix=f"renormalize=False (norm_topk_prob) of the router in {where}",
                mistake=partial(_reweighted, module, _normed), cost=0.8,
            )  # fmt: skip
        yield from _with_bias(scene, name, module, where)
        logits = next((t for t in call.outputs if t.is_floating_point() and t.shape[-1] > weights.shape[-1]), None)
        if logits is not None:
            yield from _from_logits(module, where)


def router_numbers(scene: Scene) -> Iterator[Fit]:
    """A factor of the weights that the reference does not have."""
    for _name, module in _routers(scene):
        yield Fit(
            kind="router-scale", words="ours multiplies the weights of experts by {} more",
            fix=f"routed_scaling_factor in {scene.wheres()}",
            mistake=partial(_scaled, module),
            right=1.0, tries=(), log=True, cost=1.2,
        )  # fmt: skip


def _normed(weights: Tensor, ids: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def _scaled(module: nn.Module, factor: float) -> AbstractContextManager[None]:
    return _reweighted(module, lambda weights, _: weights * factor)


def _routers(scene: Scene) -> Iterator[tuple[str, nn.Module]]:
    for name, module in scene.children():
        call = scene.base.calls.get(name)
        if call is not None and _weights(call.outputs) is not None:
            yield name, module


def _ids(outputs: Any) -> Tensor | None:
    return next((t for t in outputs if isinstance(t, Tensor) and not t.is_floating_point() and t.ndim == 2), None)


def _weights(outputs: Any) -> Tensor | None:
    ids = _ids(outputs)
    if ids is None:
        return None
    return next((t for t in outputs if isinstance(t, Tensor) and t.is_floating_point() and t.shape == ids.shape), None)


def _reweighted(module: nn.Module, change: Callable[[Tensor, Tensor], Tensor]) -> AbstractContextManager[None]:
    """Other weights for the same experts: `change(weights, ids)`."""

    def hook(output: Any, args: Any) -> Any:
        ids, weights = _ids(output), _weights(output)
        assert ids is not None and weights is not None
        return tuple(change(weights, ids) if item is weights else item for item in output)

    return patching.output(module, hook)


def _with_bias(scene: Scene, name: str, module: nn.Module, where: str) -> Iterator[Hypothesis]:
    """A correction bias that is in the weights too."""
    weight: Any = getattr(module, "weight", None)
    parent = scene.reference.modules.get(name.rpartition(".")[0], module)
    held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False),
            *parent.named_parameters(recurse=False), *parent.named_buffers(recurse=False)]  # fmt: skip
    count = weight.shape[0] if weight is not None and weight.ndim == 2 else None
    for key, bias in held:
        if bias.ndim != 1 or count != bias.shape[0]:
            continue
        scale = next((v for k, v in vars(module).items() if "scal" in k and isinstance(v, float)), 1.0)
        for normed in (True, False):
            for score in SCORES:
                yield Hypothesis(
                    kind="router-bias-in-weights",
                    words=f"ours adds {key} to the weights of experts; the reference only to what they are chosen by",
                    fix=f"take the weights from the scores without {key} in {where}",
                    mistake=partial(_biased, module, bias, normed, score, scale),
                    cost=0.9,
                )  # fmt: skip


def _biased(module: nn.Module, bias: Tensor, normed: bool, score: str, scale: float) -> AbstractContextManager[None]:
    def hook(output: Any, args: Any) -> Any:
        ids, weights = _ids(output), _weights(output)
        logits = next(t for t in output if t.is_floating_point() and t is not weights)
        assert ids is not None and weights is not None
        found = (SCORES[score](logits.float()) + bias.float()).gather(-1, ids)
        if normed:
            found = found / found.sum(-1, keepdim=True)
        return tuple((found * scale).to(weights.dtype) if item is weights else item for item in output)

    return patching.output(module, hook)


def _from_logits(module: nn.Module, where: str) -> Iterator[Hypothesis]:
    """Weights made of the chosen experts' logits alone."""

    def softmax_of_chosen(output: Any, args: Any) -> Any:
        ids, weights = _ids(output), _weights(output)
        logits = next(t for t in output if t.is_floating_point() and t is not weights)
        assert ids is not None and weights is not None
        found = logits.float().gather(-1, ids).softmax(-1)
        return tuple(found.to(weights.dtype) if item is weights else item for item in output)

    yield Hypothesis(
        kind="router-score", words="ours takes the softmax over the chosen experts alone; the reference over all",
        fix=f"the scores of the router in {where}",
        mistake=lambda: patching.output(module, softmax_of_chosen), cost=1.0,
    )  # fmt: skip
