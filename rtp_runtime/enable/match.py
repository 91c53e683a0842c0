"""Compares recorded tensors, and finds which config key a number came from.

Everything here asks one question: is this the value that was seen? Equality is up to float32 rounding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MULTIPLES = (4, 2, 3)
"""Of a size, that modeling files write where the config holds no other."""
RELATIVE = 2e-5
"""Rounding of a few float32 operations, far below any wrong formula on random data."""


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether the two hold the same values, whatever their leading axes."""
    if found.numel() != wanted.numel() or found.shape[-1] != wanted.shape[-1]:
        return False
    found, wanted = found.reshape(-1).double(), wanted.reshape(-1).double()
    return bool((found - wanted).abs().max() <= RELATIVE * wanted.abs().max())


def combination(wanted: Tensor, values: Mapping[str, Tensor]) -> dict[str, float] | None:
    """`wanted` as a sum of factors times `values`, or None: {"hidden": 1.0, "self_attn": 0.22}."""
    names = [name for name, value in values.items() if value.numel() == wanted.numel()]
    if not names:
        return None
    columns = torch.stack([values[name].reshape(-1).double() for name in names], dim=1)
    norms = columns.norm(dim=0).clamp(min=1e-30)
    columns = columns / norms
    # Normal equations: few columns, far from parallel, and float64 against data of float32.
    solution = torch.linalg.pinv(columns.T @ columns) @ (columns.T @ wanted.reshape(-1).double()) / norms
    factors = {name: _rounded(float(factor)) for name, factor in zip(names, solution, strict=True)}
    found = {name: factor for name, factor in factors.items() if abs(factor) > 1e-6}
    total = sum(
        (factor * values[name].double() for name, factor in found.items()), torch.zeros((), dtype=torch.float64)
    )
    return found if found and same(total.reshape(wanted.shape), wanted) else None


def _rounded(factor: float) -> float:
    """Without the noise of the last digits, so that layers with one factor show one."""
    return float(round(factor)) if abs(factor - round(factor)) < 1e-5 else float(f"{factor:.6g}")


@dataclass(frozen=True, slots=True)
class Expression:
    """A number as the model file writes it: `code` over `config`, and the keys it reads."""

    code: str
    keys: tuple[str, ...] = ()


def express(value: float, config: Any, keys: Iterable[str], prefer: str = "") -> Expression | None:
    """How `value` follows from one of the config `keys` (or one and the number of layers); None when it does not.

    `prefer`: a regular expression; of keys that hold one number at test size, those that it finds come first.
    """

    def order(key: str) -> tuple[bool, str]:
        return not (prefer and re.search(prefer, key)), key

    numbers = [(key, found) for key in sorted(set(keys), key=order) if (found := _number(config, key)) is not None]
    for rule in (_of_one, _of_two, _multiples, _with_layers, _rounded_roots):
        expression = rule(value, numbers, config)
        if expression is not None:
            return expression
    return None


Numbers = Sequence[tuple[str, float]]
"""Config keys and what they hold."""
FORMS: Sequence[tuple[str, Callable[[float], float]]] = (
    ("{}", lambda x: x),
    ("{}**-0.5", lambda x: x**-0.5 if x > 0 else math.nan),
    ("{}**0.5", lambda x: x**0.5 if x > 0 else math.nan),
    ("1 / {}", lambda x: 1 / x if x else math.nan),
)


def _of_one(value: float, numbers: Numbers, config: Any) -> Expression | None:
    for form, function in FORMS:
        for key, number in numbers:
            if close(function(number), value):
                return Expression(form.format(f"config.{key}"), (key,))
    return None


def _of_two(value: float, numbers: Numbers, config: Any) -> Expression | None:
    for key, number in numbers:
        for other, second in numbers:
            if key != other and number > 1 < second and close(number * second, value):
                return Expression(f"config.{key} * config.{other}", (key, other))
    return None


def _multiples(value: float, numbers: Numbers, config: Any) -> Expression | None:
    for key, number in numbers:
        for multiple in MULTIPLES:
            if close(multiple * number, value):
                return Expression(f"{multiple} * config.{key}", (key,))
    for key, number in numbers:
        if number % 2 == 0 and number > 2 and number == 2 * value:
            return Expression(f"config.{key} // 2", (key,))
    return None


def _with_layers(value: float, numbers: Numbers, config: Any) -> Expression | None:
    layers = _number(config, "num_hidden_layers")
    for key, number in numbers:
        if layers and close(number / layers**0.5, value):
            return Expression(f"config.{key} / config.num_hidden_layers**0.5", (key, "num_hidden_layers"))
    return None


def _rounded_roots(value: float, numbers: Numbers, config: Any) -> Expression | None:
    for key, number in numbers:
        if number > 0 and float(torch.tensor(number**0.5, dtype=torch.bfloat16)) == value:
            root = f'torch.tensor(config.{key}**0.5, dtype=torch.bfloat16, device="cpu")'
            return Expression(f"float({root})", (key,))
    return None


def close(found: float, wanted: float) -> bool:
    """Equal up to float32 rounding."""
    return math.isclose(found, wanted, rel_tol=1e-5)


def _number(config: Any, key: str) -> float | None:
    value = getattr(config, key, None)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
