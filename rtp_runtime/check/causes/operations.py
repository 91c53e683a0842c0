"""Mistakes in single operations: a term or factor left out or twice, another function, parts exchanged, rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from rtp_runtime.alternatives import ACTIVATION_NAMES
from rtp_runtime.check.causes import replacements as do
from rtp_runtime.check.causes.hypothesis import Fit, Hypothesis
from rtp_runtime.check.causes.scene import Scene
from rtp_runtime.check.causes.sites import Replacement, Site, Sites, is_value, narrowed

TERMS = frozenset({"add", "add_", "sub", "sub_", "rsub", "__rsub__"})
FACTORS = frozenset({"mul", "mul_", "div", "div_", "true_divide", "__rtruediv__", "rtruediv"})
FUNCTIONS = ("sigmoid", "silu", "softplus", "relu", "gelu", "tanh", "exp", "neg", "sqrt", "square", "abs", "rsqrt")
LEFT_OUT = frozenset(
    (*FUNCTIONS, *"relu6 clamp clamp_ softmax masked_fill masked_fill_ cumsum tril triu log normalize".split(),
     *"dropout roll flip clip minimum maximum pow norm".split())
)  # fmt: skip
ROUNDED = frozenset(
    (*"linear matmul bmm einsum __matmul__ conv1d softmax exp sigmoid silu softplus cos sin rsqrt sum mean".split(),
     *"mul mul_ add add_ sub div div_".split())
)  # fmt: skip
ACTIVATIONS = frozenset({"silu", "gelu", "relu", "sigmoid", "tanh", "softplus"})
PRODUCTS = frozenset({"linear", "matmul", "bmm", "__matmul__", "einsum", "baddbmm"})


class Operations:
    """The mistakes that the operations of one module allow."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        names = {module: name for name, module in scene.reference.modules.items()}
        self._sites = Sites(scene.module, names, innocent(scene))
        self._own = {id(p) for p in (*scene.module.parameters(), *scene.module.buffers())}
        self.found: list[Site] = []

    def listen(self) -> None:
        """Find the operations, in one run."""
        with self._sites.listening() as sites:
            self._scene.rerun.run()
        self.found = sites

    def plain(self) -> Iterator[Hypothesis]:
        """Mistakes of one operation, without a number to fit, those of precision apart."""
        for site in self.found:
            yield from self._arithmetic(site)
            yield from self._functions(site)
            yield from self._choices(site)
            yield from self._arrangements(site)

    def precision(self) -> Iterator[Hypothesis]:
        """One operation's result, or what goes into a product or a softmax, rounded to bfloat16."""
        for site in self.found:
            if site.name in ROUNDED and is_value(site.result):
                words = f"ours takes `{site.text}` in bfloat16; the reference in float32"
                fix = f"keep it in float32 (`.float()`), or declare its dtype, in {self._scene.wheres()}"
                yield self._hypothesis("precision", words, fix, site, lambda f, a, k: narrowed(f(*a, **k)), 1.4)
                if site.name in PRODUCTS or site.name == "softmax":
                    yield self._hypothesis("precision", words, fix, site, do.narrow_inputs, 1.5)
                    yield self._hypothesis("precision", words, fix, site, do.narrow_all, 1.6)

    def factors(self) -> Iterator[Fit]:
        """A number in an operation that is another one: a scale, an exponent, a limit."""
        for site in self.found:
            if site.name in ("mul", "mul_", "div", "div_", "add", "sub", "add_"):
                for place, value in enumerate(site.args[:2]):
                    if isinstance(value, (int, float)) and not isinstance(value, bool) and value:
                        yield self._number(site, place, float(value))
            if site.name in ("clamp", "clamp_", "clip"):
                for name in ("min", "max"):
                    value = site.kwargs.get(name)
                    if isinstance(value, (int, float)) and value:
                        yield self._number(site, name, float(value))

    # The kinds of mistakes, one method each

    def _arithmetic(self, site: Site) -> Iterator[Hypothesis]:
        if site.name not in TERMS | FACTORS or len(site.args) < 2:
            return
        one, other = site.args[:2]
        left, right = site.operands()
        what = "term" if site.name in TERMS else "factor"
        for place, operand, text in ((1, other, right), (0, one, left)):
            rest = site.args[1 - place]
            if isinstance(rest, Tensor) and _broadcasts(rest, site.result):
                text = text or _number_text(operand)
                words = f"ours leaves out `{text}` in `{site.text}`"
                yield self._hypothesis(
                    f"{what}-left-out", words, f"put `{text}` into {self._scene.wheres()}", site,
                    do.keep_only(1 - place), 1.0 if place else 1.05,
                )  # fmt: skip
        if not isinstance(other, Tensor) or id(other) in self._own or other.numel() == 1:
            text = right or _number_text(other)
            words = f"ours applies `{text}` twice; the reference has `{site.text}`"
            yield self._hypothesis(
                f"{what}-twice", words, f"apply it once in {self._scene.wheres()}", site, do.twice, 1.2
            )
        if isinstance(one, Tensor) and id(one) in self._own:
            words = f"ours applies `{left}` twice; the reference has `{site.text}`"
            fix = f"apply it once in {self._scene.wheres()}"
            yield self._hypothesis(f"{what}-twice", words, fix, site, do.first_twice, 1.2)
        if site.name in ("sub", "sub_", "add", "add_") and isinstance(other, Tensor):
            words = f"ours has the other sign of `{right}` in `{site.text}`"
            yield self._hypothesis("sign", words, f"turn the sign in {self._scene.wheres()}", site, do.other_sign, 1.3)

    def _functions(self, site: Site) -> Iterator[Hypothesis]:
        scene = self._scene
        if site.name in LEFT_OUT and site.args and isinstance(site.args[0], Tensor) and _alike(site):
            words = f"ours leaves out `{site.name}` in `{site.text}`"
            kind = {"neg": "sign", "clamp": "clamp-left-out", "clamp_": "clamp-left-out"}.get(
                site.name, "function-left-out"
            )
            yield self._hypothesis(kind, words, f"apply {site.name} in {scene.wheres()}", site, do.keep_only(0), 1.0)
        if site.name in ACTIVATIONS and site.args and is_value(site.args[0]) and _alike(site):
            name = "gelu_tanh" if site.name == "gelu" and site.kwargs.get("approximate") == "tanh" else site.name
            others = dict.fromkeys((*(o for o in ACTIVATION_NAMES if o != name), "tanh", "softplus", "exp"))
            for other in others:
                if other != site.name:
                    words = f"ours applies {other} where the reference applies {name} (`{site.text}`)"
                    yield self._hypothesis(
                        "activation", words, f'use "{name}" in {scene.wheres()}', site, do.apply(other), 1.1
                    )
        if site.name in ("softmax", "sigmoid") and site.args[0].shape[-1] == 1:
            return
        if site.name == "softmax":
            words = f"ours takes a sigmoid of the scores; the reference a softmax (`{site.text}`)"
            yield self._hypothesis("score-function", words, f"use softmax in {scene.wheres()}", site, do.sigmoid, 1.1)
        if site.name == "sigmoid":
            words = f"ours takes a softmax of the scores; the reference a sigmoid (`{site.text}`)"
            yield self._hypothesis("score-function", words, f"use sigmoid in {scene.wheres()}", site, do.softmax, 1.2)

    def _choices(self, site: Site) -> Iterator[Hypothesis]:
        scene = self._scene
        if site.name == "topk":
            place, k = (1, site.args[1]) if len(site.args) > 1 else ("k", site.kwargs.get("k"))
            for other in (k - 1, k + 1) if isinstance(k, int) else ():
                if other > 0 and not (other == 1 and self._is_summed(site)):
                    words = f"ours chooses the {other} best; the reference {k} (`{site.text}`)"
                    yield self._hypothesis(
                        "top-k", words, f"choose {k} in {scene.wheres()}", site, do.argument(place, other), 1.1
                    )
            if self._is_summed(site):
                words = "ours scores a group of experts by its best one; the reference by the sum of its two best"
                yield self._hypothesis(
                    "router-group-score",
                    words,
                    f'group_score="top2" in {scene.wheres()}',
                    site,
                    do.argument(place, 1),
                    0.7,
                )
        if site.name in ("sum", "mean", "amax", "max"):
            for reduction in ("sum", "mean", "amax"):
                if reduction != site.name and site.args and is_value(site.args[0]):
                    words = f"ours takes the {reduction} where the reference takes the {site.name} (`{site.text}`)"
                    yield self._hypothesis(
                        "reduction", words, f"use {site.name} in {scene.wheres()}", site, do.reduce(reduction), 1.2
                    )
        if site.name in ("tril", "triu"):
            for by in (-1, 1):
                words = f"ours sees {'one more' if by > 0 else 'one less'} in `{site.text}`"
                yield self._hypothesis(
                    "causality", words, f"mend the mask in {scene.wheres()}", site, do.diagonal(by), 1.2
                )
        if site.name == "conv1d":
            words = f"ours has the taps of the convolution in the opposite order (`{site.text}`)"
            yield self._hypothesis("conv-flipped", words, f"flip the weight in {scene.wheres()}", site, do.flipped, 1.1)

    def _is_summed(self, site: Site) -> bool:
        """Whether the best values that this site takes are added up."""
        after = [each.name for each in self.found if each.code is site.code and each.order > site.order]
        return site.name == "topk" and 2 in (site.args[1:2] or (site.kwargs.get("k"),)) and "sum" in after[:2]

    def _arrangements(self, site: Site) -> Iterator[Hypothesis]:
        scene = self._scene
        result = site.result
        parts = result if isinstance(result, (tuple, list)) and all(isinstance(t, Tensor) for t in result) else ()
        if site.name in ("chunk", "split", "unbind", "split_with_sizes") and len(parts) > 1:
            for one in range(len(parts)):
                for other in range(one + 1, len(parts)):
                    if parts[one].shape == parts[other].shape:
                        words = f"ours has parts {one + 1} and {other + 1} of `{site.text}` exchanged"
                        yield self._hypothesis(
                            "parts-exchanged", words, _layout_fix(scene), site, do.exchange(one, other), 1.0
                        )
            if len({t.shape for t in parts}) == 1:
                words = f"ours takes the parts of `{site.text}` by turns; in the reference one follows the other"
                yield self._hypothesis(
                    "parts-interleaved", words, _layout_fix(scene), site, do.by_turns(len(parts)), 1.1
                )
        if site.name in ("view", "reshape") and site.args and isinstance(result, Tensor):
            yield from self._views(site)
        if site.name in ("cat", "concat", "stack") and _joins_alike(site):
            words = f"ours joins the parts of `{site.text}` in the opposite order"
            yield self._hypothesis("parts-exchanged", words, _layout_fix(scene), site, do.joined_backwards, 1.1)
        if site.name == "repeat_interleave":
            words = f"ours repeats all heads in turn where the reference repeats each (`{site.text}`)"
            yield self._hypothesis("heads-tiled", words, _layout_fix(scene), site, do.tiled, 1.0)
        if site.name in PRODUCTS and len(site.args) > 1 and isinstance(site.args[1], Tensor):
            second = site.args[1]
            if second.ndim > 1 and second.shape[-1] == second.shape[-2]:
                words = f"ours transposes the second operand of `{site.text}`"
                yield self._hypothesis("transposed", words, _layout_fix(scene), site, do.transposed_second, 1.1)
            first = site.args[0]
            if isinstance(first, Tensor) and first.ndim > 1 and first.shape[-1] == first.shape[-2]:
                words = f"ours transposes the first operand of `{site.text}`"
                yield self._hypothesis("transposed", words, _layout_fix(scene), site, do.transposed_first, 1.2)
        if site.name == "transpose" and isinstance(result, Tensor) and site.args[0].shape == result.shape:
            words = f"ours leaves out the transposition in `{site.text}`"
            yield self._hypothesis("transposed", words, _layout_fix(scene), site, do.keep_only(0), 1.2)

    def _views(self, site: Site) -> Iterator[Hypothesis]:
        given, result = site.args[0], site.result
        if result.ndim > given.ndim and result.shape[-1] * result.shape[-2] == given.shape[-1] and given.ndim > 1:
            heads, dim = result.shape[-2:]
            if heads > 1 and dim > 1:
                words = f"ours takes [{dim}, {heads}] where the reference has [{heads}, {dim}] (`{site.text}`)"
                yield self._hypothesis("heads-transposed", words, _layout_fix(self._scene), site, do.split_other, 1.1)
        joined = given.ndim > max(2, result.ndim) and result.shape[-1] == given.shape[-1] * given.shape[-2]
        if joined and given.shape[-1] > 1 and given.shape[-2] > 1:
            words = f"ours lays out heads dimension by dimension in `{site.text}`"
            yield self._hypothesis("heads-transposed", words, _layout_fix(self._scene), site, do.join_other, 1.1)

    def _number(self, site: Site, place: int | str, value: float) -> Fit:
        text = site.text.replace("{", "{{").replace("}", "}}")
        tries: tuple[float, ...] = (value * value, 1.0 / value, math.sqrt(abs(value)), -value)
        return Fit(
            kind="factor" if site.name in FACTORS else "number",
            words=f"ours computes `{text}` with {{}}; the reference with {_short(value)}",
            fix=f"use {_short(value)} in {self._scene.wheres()}",
            mistake=lambda found: self._sites.wrong(site, do.argument(place, found)),
            right=value,
            tries=tries,
            log=value > 0,
            cost=2.0,
        )

    def _hypothesis(self, kind: str, words: str, fix: str, site: Site, replace: Replacement, cost: float) -> Hypothesis:
        return Hypothesis(
            kind=kind,
            words=f"{words}, in {site.where}",
            fix=fix,
            mistake=lambda: self._sites.wrong(site, replace),
            cost=cost + site.order * 1e-4,
        )


def innocent(scene: Scene) -> frozenset[str]:
    """Modules inside the accused one whose own output was compared and matches."""
    wrong = {key.module for key in scene.wrong()}
    root: nn.Module = scene.module
    inside = {f"{scene.module_name}.{name}" for name, _ in root.named_modules() if name}
    right = {key.module for key in scene.before if key.what == "output"}
    return frozenset((inside & right) - wrong)


def _layout_fix(scene: Scene) -> str:
    return f"the weight descriptor's layout, or how {scene.wheres()} splits what it is given"


def _short(value: float) -> str:
    return f"{value:.7g}"


def _number_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else "a term"


def _broadcasts(value: Tensor, result: Any) -> bool:
    return isinstance(result, Tensor) and value.numel() > 0 and value.ndim <= result.ndim


def _joins_alike(site: Site) -> bool:
    parts = site.args[0] if site.args else ()
    return isinstance(parts, (tuple, list)) and len(parts) > 1 and len({getattr(t, "shape", None) for t in parts}) == 1


def _alike(site: Site) -> bool:
    return isinstance(site.result, Tensor) and site.args[0].shape == site.result.shape
