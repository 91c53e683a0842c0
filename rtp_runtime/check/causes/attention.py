"""Mistakes in attention: what a token sees, how heads are laid out and shared, the scale, the cap, rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rtp_runtime.check.causes import patching
from rtp_runtime.check.causes.hypothesis import Fit, Hypothesis
from rtp_runtime.check.causes.scene import Scene
from rtp_runtime.check.functions import EAGER_ATTENTION, scope_of

Attend = Callable[..., Any]


def attention_mistakes(scene: Scene) -> Iterator[Hypothesis]:
    """Of the attention that the accused module calls."""
    yield from _given_masks(scene)
    for name in attending(scene):
        yield from _heads(scene, name)
        yield from _masks(scene, name)
        yield from _options(scene, name)


def attention_numbers(scene: Scene) -> Iterator[Fit]:
    """The scale of the softmax, and the cap of the scores."""
    for name in attending(scene):
        module: Any = scene.reference.modules[name]
        call = scene.base.attention[name]
        seen = _arguments(scene, name)
        scaling = float(seen.get("scaling") or call.q.shape[-1] ** -0.5)
        config = scene.reference.config.get_text_config()
        heads, hidden = int(getattr(config, "num_attention_heads", 1)), int(getattr(config, "hidden_size", 1))
        tries = [(hidden / heads) ** -0.5, 1.0, 1.0 / call.q.shape[-1], call.v.shape[-1] ** -0.5, scaling**2]
        widths = [v for k, v in vars(module).items() if "head_dim" in k and isinstance(v, int) and v > 0]
        tries += [width**-0.5 for width in widths]
        yield Fit(
            kind="attention-scale",
            words=f"ours scales the attention scores by {{}}; the reference by {scaling:.7g}",
            fix=f"the scale of Attention in {scene.wheres()}",
            mistake=partial(_with_number, scene, name, "scaling"),
            right=scaling, tries=tuple(tries), log=True, cost=1.0,
        )  # fmt: skip
        cap = seen.get("softcap")
        if cap:
            yield Fit(
                kind="softcap", words=f"ours caps the scores at {{}}; the reference at {cap:.6g}",
                fix=f"the soft cap of Attention in {scene.wheres()}",
                mistake=partial(_with_number, scene, name, "softcap"),
                right=float(cap), tries=(30.0, 50.0), log=True, cost=1.0,
            )  # fmt: skip


def attending(scene: Scene) -> list[str]:
    """Modules in (or around) the accused one that call the attention interface."""
    own, block = scene.module_name, scene.block_name
    names = [name for name in scene.base.attention if name == own or name.startswith(f"{own}.")]
    return names or [name for name in scene.base.attention if name == block and scene.key.what != "output"]


def wrapped(scene: Scene, name: str, wrap: Callable[[Attend], Attend]) -> AbstractContextManager[Any]:
    """The attention function as the module `name` calls it, wrapped; for other modules as it is."""
    module = scene.reference.modules[name]

    def only(original: Attend) -> Attend:
        mine = wrap(original)

        @functools.wraps(original)
        def attend(caller: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (mine if caller is module else original)(caller, *args, **kwargs)

        return attend

    return patching.function(scope_of(module), EAGER_ATTENTION, only)


def _given(scene: Scene, name: str, change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Any:
    """q, k and v [1, heads, tokens, dim] changed."""

    def wrap(original: Attend) -> Attend:
        def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(module, *change(q, k, v), *args, **kwargs)

        return attend

    return lambda: wrapped(scene, name, wrap)


def _with_options(scene: Scene, name: str, **options: Any) -> AbstractContextManager[Any]:
    def wrap(original: Attend) -> Attend:
        return lambda *args, **kwargs: original(*args, **{**kwargs, **options})

    return wrapped(scene, name, wrap)


def _with_number(scene: Scene, name: str, option: str, value: float) -> AbstractContextManager[Any]:
    return _with_options(scene, name, **{option: value})


def _arguments(scene: Scene, name: str) -> dict[str, Any]:
    """What the attention function is given by name."""
    seen: dict[str, Any] = {}

    def wrap(original: Attend) -> Attend:
        def attend(*args: Any, **kwargs: Any) -> Any:
            seen.update(kwargs)
            return original(*args, **kwargs)

        return attend

    scene.rerun.run(lambda: wrapped(scene, name, wrap))
    return seen


def _transposed(x: Tensor) -> Tensor:
    """[heads, dim] of each token taken for [dim, heads]."""
    flat = x.transpose(1, 2).flatten(2)
    return flat.view(*flat.shape[:2], x.shape[3], x.shape[1]).transpose(2, 3).transpose(1, 2)


def _heads(scene: Scene, name: str) -> Iterator[Hypothesis]:
    call, where = scene.base.attention[name], scene.wheres()
    heads, kv_heads = call.q.shape[1], call.k.shape[1]
    changes: list[tuple[str, str, Any]] = [
        ("heads-transposed", "takes v as [dim, heads], not [heads, dim]", lambda q, k, v: (q, k, _transposed(v))),
        ("heads-transposed", "takes k as [dim, heads], not [heads, dim]", lambda q, k, v: (q, _transposed(k), v)),
        ("heads-transposed", "takes q as [dim, heads], not [heads, dim]", lambda q, k, v: (_transposed(q), k, v)),
        ("heads-order", "has the heads of v in reverse order", lambda q, k, v: (q, k, v.flip(1))),
        ("heads-order", "has the heads of v shifted by one", lambda q, k, v: (q, k, v.roll(1, 1))),
        ("heads-order", "has the heads of k and v in reverse order", lambda q, k, v: (q, k.flip(1), v.flip(1))),
        ("keys-for-values", "takes k for v", lambda q, k, v: (q, k, k)),
        ("keys-for-values", "has k and v exchanged", lambda q, k, v: (q, v, k)),
    ]  # fmt: skip
    if 1 < kv_heads < heads:
        group = heads // kv_heads
        order = torch.arange(heads).view(group, kv_heads).T.flatten()
        back = order.argsort()
        yield Hypothesis(
            kind="grouped-heads",
            words=f"ours lets query head h share the keys of head h mod {kv_heads}; the reference of h // {group}",
            fix=f"the grouping of heads in {where}, or in the attention op",
            mistake=lambda: wrapped(scene, name, lambda original: _regrouped(original, order, back)),
            cost=0.9,
        )
        yield Hypothesis(
            kind="grouped-heads",
            words="ours groups the query heads by turns; the reference groups neighbours",
            fix=f"the grouping of heads in {where}, or in the attention op",
            mistake=lambda: wrapped(scene, name, lambda original: _regrouped(original, back, order)),
            cost=1.0,
        )
    for kind, words, change in changes:
        yield Hypothesis(
            kind=kind, words=f"ours {words}, in attention", fix=f"how {where} lays out heads",
            late=_given(scene, name, change), cost=1.1,
        )  # fmt: skip
    yield Hypothesis(
        kind="heads-transposed", words="ours lays out attention's result as [dim, heads], not [heads, dim]",
        fix=f"how {where} lays out heads", mistake=lambda: wrapped(scene, name, _result_transposed), cost=1.2,
    )  # fmt: skip


def _regrouped(original: Attend, order: Tensor, back: Tensor) -> Attend:
    def attend(module: nn.Module, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, *rest = original(module, q[:, order], *args, **kwargs)  # output [1, tokens, heads, dim]
        return (output[:, :, back], *rest)

    return attend


def _result_transposed(original: Attend) -> Attend:
    def attend(*args: Any, **kwargs: Any) -> Any:
        output, *rest = original(*args, **kwargs)
        return (output.transpose(2, 3).reshape(output.shape), *rest)

    return attend


def _masks(scene: Scene, name: str) -> Iterator[Hypothesis]:
    call = scene.base.attention[name]
    tokens, window = len(call.q), call.window
    configs = (scene.reference.config.get_text_config(), scene.session.model.loaded.config.hf.get_text_config())
    keys = ("sliding_window", "attention_chunk_size")
    declared = {w for c in configs for k in keys if isinstance(w := getattr(c, k, None), int) and w}
    known = "every token before it" if window is None else f"the last {window}"
    near = [] if window is None else [None, window + 1, window - 1, 2 * window]
    windows: list[int | None] = [*near, *declared, *(w + by for w in declared for by in (1, -1))]
    for other in dict.fromkeys(windows):
        if other != window and (other is None or 0 < other < tokens):
            seen = "every token before it" if other is None else f"the last {other} tokens"
            ignored, everywhere = other is None, window is None
            yield Hypothesis(
                kind="window-ignored" if ignored else "window-everywhere" if everywhere else "window-size",
                words=f"ours lets a token see {seen}; in the reference it sees {known}",
                fix=f"the window of Attention in {scene.wheres()}, or sliding_window and layer_types of the config",
                mistake=partial(masked, scene, name, band(tokens, other)), cost=1.0,
            )  # fmt: skip
    for by, words in ((1, "one token more, after itself"), (-1, "not itself")):
        yield Hypothesis(
            kind="causality", words=f"ours lets a token see {words}", fix=f"the mask in {scene.wheres()}",
            mistake=partial(masked, scene, name, band(tokens, window, by)), cost=1.2,
        )  # fmt: skip
    if call.visible is not None and call.visible.shape[-1] > tokens:
        for by, words in ((1, "one token late"), (-1, "one token early")):
            yield Hypothesis(
                kind="entries-shifted", words=f"ours lets compressed entries be seen {words}",
                fix=f"how many entries are visible to a query in {scene.wheres()}, or in its op",
                mistake=partial(wrapped, scene, name, partial(_entries_shifted, tokens=tokens, by=by)),
                cost=1.0,
            )  # fmt: skip


def band(tokens: int, window: int | None, ahead: int = 0) -> Tensor:
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = distance >= -ahead
    seen = seen if window is None else seen & (distance < window)
    seen[0, 0] = True
    return seen


def masked(scene: Scene, name: str, seen: Tensor) -> AbstractContextManager[Any]:
    """The mask over tokens replaced; columns for other keys stay."""
    tokens = len(seen)
    mask = torch.zeros(1, 1, tokens, tokens).masked_fill(~seen, torch.finfo(torch.float32).min)

    def wrap(original: Attend) -> Attend:
        def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: Any, *args: Any, **kwargs: Any) -> Any:
            new: Tensor = mask if not isinstance(given, Tensor) or given.dtype != torch.bool else seen[None, None]
            if isinstance(given, Tensor) and given.shape[-1] > tokens:
                new = torch.cat([new.expand(*given.shape[:2], -1, -1), given[..., tokens:]], dim=-1)
            return original(module, q, k, v, new, *args, **kwargs)

        return attend

    return wrapped(scene, name, wrap)


def _given_masks(scene: Scene) -> Iterator[Hypothesis]:
    """A module that is given a mask, as a selector of keys is, sees one token more or less."""
    tokens, module = len(scene.rerun.ids), scene.module
    for by, words in ((1, "one token more, after itself"), (-1, "one token less")):
        yield Hypothesis(
            kind="causality", words=f"ours lets {scene.module_name} see {words}",
            fix=f"what a token may see in {scene.wheres()}, or in its op",
            mistake=partial(_seeing, module, tokens, by), cost=1.2,
        )  # fmt: skip


@contextmanager
def _seeing(module: nn.Module, tokens: int, by: int) -> Iterator[None]:
    """Masks [..., tokens, keys] that the module is given, moved by one key."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 3 or value.shape[-2:] != (tokens, tokens):
            return value
        out = value.roll(by, -1)
        edge = 0 if by > 0 else tokens - 1
        out[..., edge] = value[..., edge]
        return out

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return tuple(map(moved, args)), {key: moved(value) for key, value in kwargs.items()}

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _entries_shifted(original: Attend, tokens: int, by: int) -> Attend:
    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        entries = given[..., tokens:].roll(by, 2)
        if by > 0:
            entries[:, :, :by] = given[:, :, :by, tokens:]
        return original(module, q, k, v, torch.cat([given[..., :tokens], entries], dim=-1), *args, **kwargs)

    return attend


def _options(scene: Scene, name: str) -> Iterator[Hypothesis]:
    seen = _arguments(scene, name)
    for key, kind, words in (
        ("softcap", "softcap-left-out", "leaves out the soft cap of the scores"),
        ("s_aux", "sinks-left-out", "leaves out the attention sinks"),
        ("position_bias", "bias-left-out", "leaves out the position bias of the scores"),
    ):
        if seen.get(key) is not None:
            yield Hypothesis(
                kind=kind, words=f"ours {words}", fix=f"give Attention its {key} in {scene.wheres()}",
                mistake=partial(_with_options, scene, name, **{key: None}), cost=0.8,
            )  # fmt: skip
