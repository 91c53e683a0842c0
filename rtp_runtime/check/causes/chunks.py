"""Mistakes in what one chunk hands to the next: dropped, rounded, or seen by too few of its tokens."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rtp_runtime.check.causes import patching
from rtp_runtime.check.causes.attention import attending, band, masked
from rtp_runtime.check.causes.hypothesis import Hypothesis
from rtp_runtime.check.causes.scene import Scene
from rtp_runtime.check.causes.sites import narrowed
from rtp_runtime.check.functions import scope_of

STATE = "initial_state"
"""The argument of recurrences through which a state goes on."""


def chunk_mistakes(scene: Scene) -> Iterator[Hypothesis]:
    """`scene.parts`: lengths of the steps in which ours was fed."""
    if len(scene.parts) > 1:
        yield from _in_attention(scene)
        for name, scope in _functions(scene):
            yield from _in_function(scene, name, scope)


def _in_attention(scene: Scene) -> Iterator[Hypothesis]:
    ends = torch.tensor(scene.parts).cumsum(0)
    tokens = len(scene.rerun.ids)
    chunk = torch.bucketize(torch.arange(tokens), ends, right=True)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    near_enough = distance < torch.tensor(scene.parts)[chunk.clamp(max=len(scene.parts) - 1)][:, None]
    wrong = scene.wrong_tokens()
    where = f"what {scene.wheres()} or its op sees of earlier steps"
    for name in attending(scene):
        window = scene.base.attention[name].window
        plain = band(tokens, window)
        near = [] if window is None else [window - 1, window + 1]
        sizes = [w for w in (None, *near) if w is None or w > 0]
        masks: list[tuple[str, str, Tensor]] = [
            ("state-across-chunks", "a chunk sees itself alone", plain & (chunk[:, None] == chunk)),
            ("state-across-chunks", "a token sees no more tokens than its chunk has", plain & near_enough),
            *(
                ("window-size", f"the window is {w} in such steps, not {window}", band(tokens, w))
                for w in sizes
                if w != window
            ),
            ("causality", "a token does not see itself in such steps", band(tokens, window, -1)),
            ("causality", "a token sees one more in such steps", band(tokens, window, 1)),
        ]  # fmt: skip
        for kind, words, seen in masks:
            mixed = torch.where(wrong[:, None], seen, plain)
            yield Hypothesis(
                kind=kind, words=f"ours is right in one prefill; in {_mode(scene)}, {words}", fix=where,
                mistake=partial(masked, scene, name, mixed), cost=1.0,
            )  # fmt: skip


def _mode(scene: Scene) -> str:
    """The mode, or the steps that are not a prefill of the whole prompt."""
    return "steps of one token" if scene.parts.count(1) == len(scene.parts) - 1 else scene.mode


def _functions(scene: Scene) -> Iterator[tuple[str, dict[str, Any]]]:
    """Functions of the modeling file that the accused block calls with values of all tokens."""
    module = scene.reference.modules[scene.block_name]
    scope = scope_of(module)
    code = inspect.unwrap(type(module).forward).__code__
    for name in code.co_names:
        if inspect.isfunction(scope.get(name)):
            yield name, scope


def _in_function(scene: Scene, name: str, scope: dict[str, Any]) -> Iterator[Hypothesis]:
    def wrap(step: Callable[[Tensor], Tensor] | None) -> Callable[[Any], Any]:
        return lambda original: _by_parts(original, scene.parts, step)

    def with_state(step: Callable[[Tensor], Tensor] | None) -> AbstractContextManager[Any]:
        return patching.function(scope, name, wrap(step))

    fix = f"the state descriptor (its dtype) and how {scene.wheres()} reads and writes its state"
    words = f"ours is right in one prefill; in {_mode(scene)}, what {name} computes starts anew with each step"
    yield Hypothesis(kind="state-across-chunks", words=words, fix=fix, mistake=lambda: with_state(None), cost=1.0)
    if STATE in inspect.signature(inspect.unwrap(scope[name])).parameters:
        words = (
            f"ours is right in one prefill; in {_mode(scene)}, the state of {name} is rounded to bfloat16 between steps"
        )
        yield Hypothesis(kind="precision", words=words, fix=fix, mistake=lambda: with_state(narrowed), cost=0.9)


def _by_parts(original: Any, parts: Sequence[int], step: Callable[[Tensor], Tensor] | None) -> Any:
    """The function called for each part of the tokens. `step`: what becomes of a state in between; None: dropped."""
    tokens = sum(parts)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        outputs, state, start = [], None, 0
        for length in parts:
            place = slice(start, start + length)
            mine = [_part(a, place, tokens) for a in args]
            more = {k: _part(v, place, tokens) for k, v in kwargs.items()}
            if step is not None:
                more |= {STATE: state, "output_final_state": True}
            result = original(*mine, **more)
            outputs.append(result[0] if isinstance(result, tuple) else result)
            rest = result[1:] if isinstance(result, tuple) else None
            state = None if step is None or rest is None else step(rest[0])
            start += length
        dim = next(d for d, size in enumerate(outputs[0].shape) if d and size == parts[0])
        joined = torch.cat(outputs, dim=dim)
        return joined if rest is None else (joined, *rest)

    return call


def _part(value: Any, place: slice, tokens: int) -> Any:
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    dim = next((d for d, size in enumerate(value.shape) if d and size == tokens), None)
    return value if dim is None else value.narrow(dim, place.start, place.stop - place.start)
