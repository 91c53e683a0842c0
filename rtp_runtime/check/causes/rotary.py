"""Mistakes in the rotary embedding: base, scaling, share, layout, rounding of tables and angles."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rtp_runtime.alternatives import SHARES, THETAS, turned
from rtp_runtime.check.causes import patching
from rtp_runtime.check.causes.hypothesis import Fit, Hypothesis
from rtp_runtime.check.causes.scene import Scene
from rtp_runtime.check.causes.sites import narrowed
from rtp_runtime.check.functions import scope_of

ROTATES = re.compile(r"rotary|rope")
LAYOUTS = {"half": "in halves", "interleaved": "in interleaved pairs"}
SAME = 1e-5


def rotary_mistakes(scene: Scene) -> Iterator[Hypothesis]:
    """Of the tables, if a rotary module is accused; of how heads are turned, if attention is."""
    for name, module in _tables(scene):
        yield from _table_mistakes(scene, name, module)
    if scene.layer is not None and not _is_table(scene.module):
        yield from _layouts(scene)


def rotary_numbers(scene: Scene) -> Iterator[Fit]:
    """Another base, or another factor."""
    for _name, module in _tables(scene):
        for path in _rope_paths(module.config):
            values = _at(module.config, path)
            for key, tries in (("rope_theta", THETAS), ("factor", ()), ("partial_rotary_factor", SHARES)):
                right = values.get(key)
                if isinstance(right, (int, float)) and right:
                    ours = _our_value(scene, path, key)
                    yield Fit(
                        kind={"rope_theta": "rope-theta", "factor": "rope-factor"}.get(key, "rope-share"),
                        words=f"ours turns heads as if {key} were {{}}; the reference has {right:.7g}",
                        fix=f"{key} in rope_parameters of config.json, or where {scene.wheres()} reads it",
                        mistake=partial(_with_value, module, path, key),
                        right=float(right), tries=(*([ours] if ours else []), *tries, 10 * right, right / 10),
                        step=1e-3, log=True, cost=1.0,
                    )  # fmt: skip


def _tables(scene: Scene) -> list[tuple[str, nn.Module]]:
    """The rotary modules in the accused one, itself among them."""
    return [(name, module) for name, module in scene.children() if _is_table(module)]


def _is_table(module: nn.Module) -> bool:
    return any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)) and hasattr(module, "config")


def _rope_paths(config: Any) -> list[tuple[str, ...]]:
    """Where dicts with a theta stand in the config."""
    found: list[tuple[str, ...]] = []
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in parameters:
        found.append(("rope_parameters",))
    found += [("rope_parameters", key) for key, v in parameters.items() if isinstance(v, dict) and "rope_theta" in v]
    return found


def _at(config: Any, path: tuple[str, ...]) -> dict[str, Any]:
    value: Any = getattr(config, path[0])
    for key in path[1:]:
        value = value[key]
    return dict(value)


def _our_value(scene: Scene, path: tuple[str, ...], key: str) -> float | None:
    try:
        value = _at(scene.session.model.loaded.config.hf.get_text_config(), path).get(key)
    except (AttributeError, KeyError, TypeError):
        return None
    return float(value) if isinstance(value, (int, float)) else None


@contextmanager
def rebuilt(module: Any, path: tuple[str, ...], values: dict[str, Any]) -> Iterator[None]:
    """The rotary module with the tables that it would have with other rope parameters."""
    config = copy.deepcopy(module.config)
    target: Any = getattr(config, path[0])
    for key in path[1:]:
        target = target[key]
    target.update(values)
    for key in [key for key, value in values.items() if value is None]:
        del target[key]
    other = type(module)(config=config)
    with ExitStack() as stack:
        for name, buffer in other.named_buffers(recurse=False):
            stack.enter_context(patching.tensor(module, name, buffer))
        for name, value in vars(other).items():
            if isinstance(value, float) and name in vars(module):
                stack.enter_context(patching.attribute(module, name, value))
        yield


def _with_value(module: Any, path: tuple[str, ...], key: str, value: float) -> AbstractContextManager[None]:
    return rebuilt(module, path, {key: value})


def _table_mistakes(scene: Scene, name: str, module: nn.Module) -> Iterator[Hypothesis]:
    where = scene.wheres()
    for path in _rope_paths(module.config):
        values = _at(module.config, path)
        kind, factor = values.get("rope_type", "default"), values.get("factor")
        if kind != "default":
            yield Hypothesis(
                kind="rope-scaling-left-out", words=f"ours leaves out the {kind} scaling of the rotary table",
                fix=f"rope_type and its numbers in rope_parameters, or where {where} reads them",
                mistake=partial(rebuilt, module, path, {"rope_type": "default"}), cost=0.9,
            )  # fmt: skip
            if factor:
                yield Hypothesis(
                    kind="rope-scaling-twice", words=f"ours applies the {kind} scaling of the rotary table twice",
                    fix=f"apply it once in {where}",
                    mistake=partial(rebuilt, module, path, {"factor": factor * factor}), cost=0.9,
                )  # fmt: skip
            yield Hypothesis(
                kind="rope-attention-factor", words="ours leaves out the factor of cos and sin (attention_factor)",
                fix=f"attention_factor of rope_parameters in {where}",
                mistake=partial(rebuilt, module, path, {"attention_factor": 1.0}), cost=0.9,
            )  # fmt: skip
        yield from _other_types(scene, module, path, values)
    yield Hypothesis(
        kind="precision", words=f"ours rounds inv_freq of {name} to bfloat16; the reference keeps it in float32",
        fix=f"keep inv_freq in float32 in {where}", mistake=lambda: _narrow_tables(module), cost=1.0,
    )  # fmt: skip
    yield Hypothesis(
        kind="precision", words=f"ours rounds cos and sin of {name} to bfloat16; the reference keeps them in float32",
        fix=f"keep cos and sin in float32 in {where}",
        mistake=lambda: patching.output(module, lambda given, args: tuple(map(narrowed, given))), cost=1.0,
    )  # fmt: skip
    for by in (1, -1):
        yield Hypothesis(
            kind="positions", words=f"our positions are off by {by}", fix=f"the positions that {where} is given",
            mistake=partial(_moved_positions, module, by), cost=1.0,
        )  # fmt: skip


def _other_types(
    scene: Scene, module: nn.Module, path: tuple[str, ...], values: dict[str, Any]
) -> Iterator[Hypothesis]:
    """What our config says where it says something else."""
    try:
        ours = _at(scene.session.model.loaded.config.hf.get_text_config(), path)
    except (AttributeError, KeyError, TypeError):
        return
    if ours != values:
        differing = sorted(k for k in ours.keys() | values.keys() if ours.get(k) != values.get(k))
        told = "; ".join(f"{k} {ours.get(k)!r}, the reference {values.get(k)!r}" for k in differing)
        kind = "rope-theta" if differing == ["rope_theta"] else "rope-parameters"
        yield Hypothesis(
            kind=kind, words=f"our config has other rope_parameters: {told}",
            fix="rope_parameters of config.json",
            mistake=lambda: rebuilt(module, path, {**{k: None for k in values}, **ours}), cost=0.5,
        )  # fmt: skip


@contextmanager
def _narrow_tables(module: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                stack.enter_context(patching.tensor(module, name, narrowed(buffer)))
        yield


def _moved_positions(module: nn.Module, by: int) -> AbstractContextManager[Any]:
    original = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        moved = [a + by if isinstance(a, Tensor) and not a.is_floating_point() else a for a in args]
        more = {k: v + by if isinstance(v, Tensor) and not v.is_floating_point() else v for k, v in kwargs.items()}
        return original(module, *moved, **more)

    return patching.forward(module, forward)


def _layouts(scene: Scene) -> Iterator[Hypothesis]:
    """Heads turned in the other layout, backwards, or not at all, by each function that turns any."""
    for name, scope in _rotating(scene):
        yield from _turned_otherwise(scene, name, scope)


def _turned_otherwise(scene: Scene, name: str, scope: dict[str, Any]) -> Iterator[Hypothesis]:
    where, seen = f"the rotation of heads in {scene.wheres()}", _Seen()
    scene.rerun.run(lambda: patching.function(scope, name, seen.listening))
    told = f"the reference turns them {LAYOUTS.get(seen.layout or '', 'as it does')}"
    for other in (other for other in ("half", "interleaved") if seen.layout and other != seen.layout):
        turn = partial(_turn, layout=other, at_end=seen.at_end)
        yield Hypothesis(
            kind="rotary-layout",
            words=f"ours turns heads {LAYOUTS[other]}; {told}",
            fix=f'Rotary("{seen.layout}") in {scene.wheres()}',
            mistake=partial(patching.function, scope, name, partial(_each, change=turn)),
            cost=0.8,
        )
    changes: list[tuple[str, str, Callable[..., Tensor]]] = [("rotary-left-out", "does not turn heads", _not_turned)]
    if seen.layout:
        back = partial(_turned_back, layout=seen.layout, at_end=seen.at_end)
        changes.append(("rotary-direction", "turns heads the other way", back))
    for kind, words, change in changes:
        yield Hypothesis(
            kind=kind,
            words=f"ours {words}; {told}",
            fix=where,
            mistake=partial(patching.function, scope, name, partial(_each, change=change)),
            cost=1.0,
        )
    for place, part in ((0, "q"), (1, "k")) if seen.count > 1 else ():
        yield Hypothesis(
            kind="rotary-left-out",
            words=f"ours does not turn {part}; the reference turns q and k",
            fix=where,
            mistake=partial(patching.function, scope, name, _without(place)),
            cost=1.1,
        )
    for number in range(seen.calls) if seen.calls > 1 else ():
        yield Hypothesis(
            kind="rotary-left-out",
            words=f"ours leaves out turn {number + 1} of the {seen.calls} that the reference makes ({name})",
            fix=where,
            mistake=partial(patching.function, scope, name, partial(_without_call, number=number)),
            cost=1.1,
        )


def _rotating(scene: Scene) -> Iterator[tuple[str, dict[str, Any]]]:
    """Functions of the modeling files that turn heads, with the globals that they stand in."""
    done = set()
    for _, module in scene.children(scene.block_name):
        scope = scope_of(module)
        for name in [name for name in scope if ROTATES.search(name) and callable(scope[name])]:
            if not isinstance(scope[name], type) and (id(scope), name) not in done:
                done.add((id(scope), name))
                yield name, scope


class _Seen:
    """Listens to a function that turns heads, and finds in which layout it does."""

    def __init__(self) -> None:
        self.layout: str | None = None
        self.at_end = False
        self.count = 0
        """Tensors that one call turns."""
        self.calls = 0

    def listening(self, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            xs, cos, sin = _parts(args, kwargs)
            outputs = result if isinstance(result, tuple) else (result,)
            self.calls += bool(xs)
            if xs and self.layout is None and len(outputs) == len(xs):
                self.count = len(xs)
                self._recognise(xs[0], cos, sin, outputs[0])
            return result

        return call

    def _recognise(self, x: Tensor, cos: Tensor, sin: Tensor, wanted: Tensor) -> None:
        for layout in ("half", "interleaved", "interleaved_to_half"):
            for at_end in (False, True):
                mine = _turn(x, cos, sin, layout, at_end)
                if self.layout is None and mine.shape == wanted.shape and _same(mine, wanted):
                    self.layout, self.at_end = layout, at_end


def _same(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= SAME * float(other.norm())


def _parts(args: Any, kwargs: Any) -> tuple[list[Tensor], Any, Any]:
    """(what is turned, cos, sin) of a call: the last two tensors are the angles."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if len(tensors) < 3 or any(t.is_complex() for t in tensors):
        return [], None, None
    *xs, cos, sin = tensors
    return (xs, cos, sin) if cos.shape == sin.shape and cos.is_floating_point() else ([], None, None)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, layout: str, at_end: bool = False) -> Tensor:
    """x [1, heads, tokens, dim] (or [1, tokens, heads, dim]) turned by angles [1, tokens, dim or half of it]."""
    tokens = cos.shape[-2]
    swap = x.ndim == 4 and x.shape[2] == tokens and x.shape[1] != tokens
    rows = x[0].transpose(0, 1) if swap else x[0]  # [tokens, heads, dim]
    flat = rows if rows.ndim == 3 else rows[:, None]
    c, s = _once(cos.reshape(-1, cos.shape[-1])), _once(sin.reshape(-1, sin.shape[-1]), cos.reshape(-1, cos.shape[-1]))
    out = turned(flat, c, s, layout, at_end).reshape(rows.shape)
    return (out.transpose(0, 1) if swap else out)[None]


def _turned_back(x: Tensor, cos: Tensor, sin: Tensor, layout: str, at_end: bool) -> Tensor:
    return _turn(x, cos, -sin, layout, at_end)


def _not_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x


def _without_call(original: Any, number: int) -> Any:
    """The function, but for its call of this number, which turns nothing."""
    calls = itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        xs, _, _ = _parts(args, kwargs)
        if not xs or next(calls) != number:
            return original(*args, **kwargs)
        return tuple(xs) if len(xs) > 1 else xs[0]

    return call


def _once(table: Tensor, guide: Tensor | None = None) -> Tensor:
    """Each angle once, where it stands twice: as halves or side by side."""
    guide = table if guide is None else guide
    half = guide.shape[-1] // 2
    if torch.equal(guide[:, :half], guide[:, half:]):
        return table[:, :half]
    if torch.equal(guide[:, ::2], guide[:, 1::2]):
        return table[:, ::2]
    return table


def _each(original: Any, change: Callable[..., Tensor]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        xs, cos, sin = _parts(args, kwargs)
        if not xs:
            return original(*args, **kwargs)
        outputs = tuple(change(x, cos, sin) for x in xs)
        return outputs if len(outputs) > 1 else outputs[0]

    return call


def _without(place: int) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            outputs = list(original(*args, **kwargs))
            outputs[place] = _parts(args, kwargs)[0][place]
            return tuple(outputs)

        return call

    return wrap
