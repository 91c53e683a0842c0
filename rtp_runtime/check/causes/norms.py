"""Mistakes in norms: eps and its place, w against 1 + w, per head against whole vector, gate before or after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from rtp_runtime.alternatives import EPS_VALUES, NormForm, norm_variants
from rtp_runtime.check.causes import patching
from rtp_runtime.check.causes.hypothesis import Fit, Hypothesis
from rtp_runtime.check.causes.operations import innocent
from rtp_runtime.check.causes.replacements import FUNCTION_OF
from rtp_runtime.check.causes.scene import Scene

WORDS = {
    "norm-offset": ("weighs with w + {other:g}", "w + {own:g}"),
    "norm-weight": ("leaves the weight out", "has one"),
    "norm-bias": ("leaves the bias out", "has one"),
    "norm-centred": ("is a {other} norm", "a {own} norm"),
    "norm-whole-vector": ("is over {other}", "over {own}"),
    "norm-eps-place": ("adds eps {other}", "{own}"),
    "norm-size": ("divides by the {other}", "the {own}"),
}
SAME = 2e-6


def norm_mistakes(scene: Scene) -> Iterator[Hypothesis]:
    """Other forms of the norms that may be at fault."""
    for name, module, form in _norms(scene):
        for kind, other in norm_variants(form):
            yield Hypothesis(
                kind=kind,
                words=_words(kind, name, form, other),
                fix=f"the norm's arguments (offset, eps, shape) in {scene.wheres()}",
                mistake=partial(patching.forward, module, applying(module, other)),
            )
        yield Hypothesis(
            kind="norm-left-out",
            words=f"ours leaves out {name}",
            fix=f"apply it in {scene.wheres()}",
            mistake=partial(patching.forward, module, _as_given),
            cost=0.9,
        )
    yield from _gated_mistakes(scene)


def norm_numbers(scene: Scene) -> Iterator[Fit]:
    """Another eps."""
    for name, module, form in _norms(scene):
        yield Fit(
            kind="norm-eps",
            words=f"ours computes {name} with eps {{}}; the reference has {form.eps:g}",
            fix=f"eps of the norm in {scene.wheres()}, or the config key that it is read from",
            mistake=partial(_with_eps, module, form),
            right=form.eps,
            tries=(*EPS_VALUES, 10 * form.eps, form.eps / 10, 0.0),
            step=0.5,
            cost=1.0,
        )


def _as_given(x: Tensor, *_: Any) -> Tensor:
    return x


def _with_eps(module: nn.Module, form: NormForm, eps: float) -> AbstractContextManager[None]:
    return patching.forward(module, applying(module, replace(form, eps=eps)))


def applying(module: nn.Module, form: NormForm) -> Any:
    """A forward that computes this form with the module's parameters."""

    def forward(x: Tensor, *_: Any) -> Tensor:
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        batched = x.ndim > 2 and x.shape[0] == 1
        result = form.apply(x[0] if batched else x, weight, bias)
        return result[None] if batched else result

    return forward


def recognised(module: nn.Module, x: Tensor, wanted: Tensor) -> NormForm | None:
    """The form that gives this output; None where none does."""
    eps = norm_eps(module)
    if eps is None or x.shape != wanted.shape:
        return None
    for centred in (False, True):
        for offset in (0.0, 1.0):
            form = NormForm(eps=eps, centred=centred, offset=offset)
            weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
            if weight is not None and (weight.ndim != 1 or weight.shape[-1] != x.shape[-1]):
                return None
            if _same(form.apply(x, weight, bias), wanted):
                return form
    return None


def norm_eps(module: nn.Module) -> float | None:
    """The number that a norm calls its eps."""
    return next((v for k, v in vars(module).items() if "eps" in k and isinstance(v, float)), None)


def _norms(scene: Scene) -> Iterator[tuple[str, nn.Module, NormForm]]:
    """The accused norm, or the norms in the accused block that are not cleared."""
    clean = innocent(scene)
    for name, module in scene.children():
        call = scene.base.calls.get(name)
        if name in clean or call is None or not call.inputs or not call.outputs:
            continue
        form = recognised(module, call.inputs[0], call.outputs[0])
        if form is not None:
            yield name, module, form


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and float((one - other).norm()) <= SAME * float(other.norm())


def _words(kind: str, name: str, form: NormForm, other: NormForm) -> str:
    values: dict[str, tuple[Any, ...]] = {
        "norm-offset": (form.offset, other.offset),
        "norm-centred": tuple("layer" if f.centred else "root-mean-square" for f in (form, other)),
        "norm-whole-vector": tuple("the whole vector" if f.whole else "each head" for f in (form, other)),
        "norm-eps-place": tuple("outside the root" if f.eps_outside else "inside the root" for f in (form, other)),
        "norm-size": tuple("length" if f.sum_of_squares else "root of the mean square" for f in (form, other)),
    }
    own, wrong = values.get(kind, ("", ""))
    ours, theirs = WORDS[kind]
    return f"our {name} {ours.format(own=own, other=wrong)}; the reference's {theirs.format(own=own, other=wrong)}"


def _gated_mistakes(scene: Scene) -> Iterator[Hypothesis]:
    """A norm with a gate: the gate before the norm instead of after it, or the reverse."""
    for name, module in scene.children():
        call, eps = scene.base.calls.get(name), norm_eps(module)
        if call is None or eps is None or len(call.inputs) != 2 or not call.outputs:
            continue
        for act in ("silu", "sigmoid"):
            for first in (False, True):
                x, gate = (t.flatten(0, -2) for t in call.inputs)
                wanted = call.outputs[0].flatten(0, -2)
                if x.shape == gate.shape == wanted.shape and _same(_gated(module, eps, act, first)(x, gate), wanted):
                    yield Hypothesis(
                        kind="norm-gate-place",
                        words=f"our {name} applies its gate {'after' if first else 'before'} the norm; the reference "
                        f"{'before' if first else 'after'} it",
                        fix=f"gate_first of the gated norm in {scene.wheres()}",
                        mistake=partial(patching.forward, module, _gated(module, eps, act, not first)),
                    )
                    return


def _gated(module: nn.Module, eps: float, act: str, first: bool) -> Any:
    form = NormForm(eps=eps)
    weight: Any = getattr(module, "weight", None)

    def forward(x: Tensor, gate: Tensor | None = None, *_: Any) -> Tensor:
        assert gate is not None
        factor = FUNCTION_OF[act](gate.float())
        if first:
            return form.apply(x.float() * factor, weight)
        result: Tensor = form.apply(x.float(), weight) * factor
        return result

    return forward
