"""Which rule over the config decides in which layers something stands; each is tried on all layers, simplest first."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from rtp_runtime.enable.code import literal
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.recognise.view import View

COUNTING = re.compile(r"layer|period|interval|freq|every|step|stride|skip|offset|dense")
SIZE = re.compile(
    r"num_hidden_layers|_id$|head|expert|size|dim|rank|group|topk|top_k|expand|conv|kernel|n_inner|factor"
)
Truth = tuple[bool, ...]
"""What a rule says of each layer."""


def condition(view: View, holds: Sequence[bool | None], what: str) -> str | None:
    """Code over `config` and `layer` that is true where `holds` is; None when that is every layer.

    Args:
        holds: per layer; None where the rule is not asked.

    Raises:
        UnrecognisedError: layers differ and no rule over the config says which.
    """
    asked = [layer for layer, held in enumerate(holds) if held is not None]
    if all(holds[layer] for layer in asked) or not any(holds[layer] for layer in asked):
        return None

    def fits(truth: Truth) -> bool:
        return all(truth[layer] == holds[layer] for layer in asked)

    rules = list(_rules(_values(view), len(holds)))
    for code, truth in rules:
        if fits(truth):
            return code
    for (code, truth), (other, second) in itertools.combinations(rules, 2):
        if fits(tuple(a and b for a, b in zip(truth, second, strict=True))):
            return f"{code} and {other}"
    raise UnrecognisedError(
        type(view.reference.model).__name__,
        f"some layers have {what} and no rule over the config says which.",
        "that rule",
    )


def _values(view: View) -> dict[str, Any]:
    """What the config holds, and lists that it derives when the reference reads them (`layers_block_type`)."""
    values: dict[str, Any] = view.config.to_dict()
    derived = {key: getattr(view.config, key, None) for key in view.reference.reads if key not in values}
    return values | {key: value for key, value in derived.items() if isinstance(value, list | tuple)}


def _rules(values: dict[str, Any], depth: int) -> Iterator[tuple[str, Truth]]:
    layers = range(depth)
    lists = {key: value for key, value in values.items() if isinstance(value, list | tuple)}
    numbers = {key: value for key, value in _counts(values) if 0 < value <= depth}
    for key, value in lists.items():
        if len(value) == depth:
            yield from _by_value(f"config.{key}[layer]", value)
    for key, value in lists.items():
        if value and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            yield f"layer in config.{key}", tuple(layer in value for layer in layers)
            yield f"layer not in config.{key}", tuple(layer not in value for layer in layers)
    for key, number in numbers.items():
        yield f"layer < config.{key}", tuple(layer < number for layer in layers)
        yield f"layer >= config.{key}", tuple(layer >= number for layer in layers)
    for key, number in numbers.items():
        if number > 1:
            yield from _periods(key, number, values, layers)
    yield "layer % 2 == 0", tuple(layer % 2 == 0 for layer in layers)
    yield "layer % 2 == 1", tuple(layer % 2 == 1 for layer in layers)
    yield "layer == 0", tuple(layer == 0 for layer in layers)
    yield "layer > 0", tuple(layer > 0 for layer in layers)
    last = depth - 1
    yield "layer == config.num_hidden_layers - 1", tuple(layer == last for layer in layers)
    yield "layer < config.num_hidden_layers - 1", tuple(layer < last for layer in layers)


def _counts(values: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Numbers that may count layers, those that say so first: small sizes of heads and experts fit by chance."""
    found = [(k, v) for k, v in values.items() if isinstance(v, int) and not isinstance(v, bool)]
    told = [(key, value) for key, value in found if COUNTING.search(key) and key != "num_hidden_layers"]
    yield from told
    yield from (pair for pair in found if pair not in told and not SIZE.search(pair[0]))


def _by_value(place: str, values: Sequence[Any]) -> Iterator[tuple[str, Truth]]:
    """The list's entry is one value, or one of several; a switch is true or false."""
    kinds = list(dict.fromkeys(repr(value) for value in values))
    known = {repr(value): value for value in values}
    if all(value in (0, 1, None) for value in values):
        yield place, tuple(bool(value) for value in values)
        yield f"not {place}", tuple(not value for value in values)
        return
    if len(kinds) > 8 or not all(isinstance(value, str | int | None) for value in values):
        return
    for size in range(1, len(kinds)):
        for chosen in itertools.combinations(kinds, size):
            codes = [literal(known[kind]) for kind in chosen]
            code = f"{place} == {codes[0]}" if size == 1 else f"{place} in ({', '.join(codes)})"
            yield code, tuple(repr(value) in chosen for value in values)


def _periods(key: str, number: int, values: dict[str, Any], layers: range) -> Iterator[tuple[str, Truth]]:
    """Every nth layer, counted from an offset that the config holds, or else from the first or from the second."""
    related = [other for other in values if "offset" in other and other.split("_")[0] == key.split("_")[0]]
    for other in related:
        offset, code = values[other], f"layer % config.{key}"
        if isinstance(offset, int) and 0 <= offset < number:
            yield f"{code} == config.{other}", tuple(layer % number == offset for layer in layers)
            yield f"{code} != config.{other}", tuple(layer % number != offset for layer in layers)
    if related:
        return
    for shown in ("layer", "(layer + 1)"):
        shift = 0 if shown == "layer" else 1
        yield f"{shown} % config.{key} == 0", tuple((layer + shift) % number == 0 for layer in layers)
        yield f"{shown} % config.{key} != 0", tuple((layer + shift) % number != 0 for layer in layers)
