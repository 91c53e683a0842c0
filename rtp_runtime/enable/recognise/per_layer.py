"""Which config list decides what differs between layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rtp_runtime.enable.code import literal
from rtp_runtime.enable.findings import PerLayer, UnrecognisedError
from rtp_runtime.enable.match import express
from rtp_runtime.enable.recognise.attention import LayerFacts
from rtp_runtime.enable.recognise.view import View

WINDOW_KEY = "sliding_window"
"""Read by transformers' mask functions rather than by the modeling file."""


def differing(view: View, facts: Sequence[LayerFacts]) -> PerLayer:
    """Windows and rotary by layer, as code over `config` and `layer`.

    Raises:
        UnrecognisedError: layers differ and no per-layer list of the config says which.
    """
    windows = {fact.window for fact in facts if fact.window is not None}
    block = type(view.reference.model).__name__
    if len(windows) > 1:
        raise UnrecognisedError(block, f"its layers have windows of {sorted(windows)} tokens.", "a window per layer")
    window = express(windows.pop(), view.config, [*view.reference.reads, WINDOW_KEY]) if windows else None
    if window is None and any(fact.window for fact in facts):
        raise UnrecognisedError(block, "its window follows from none of the config keys.", "that rule")
    return PerLayer(
        window=window.code if window else None,
        window_if=_condition(view, [fact.window is not None for fact in facts], "a window") if window else None,
        rotary_if=_condition(view, [fact.table is not None for fact in facts], "rotary positions"),
    )


def _condition(view: View, holds: Sequence[bool], what: str) -> str | None:
    """Code that is true for the layers where `holds` is; None when that is all of them."""
    if all(holds) or not any(holds):
        return None
    for key, value in view.config.to_dict().items():
        if isinstance(value, list) and len(value) == len(holds):
            code = _code(f"config.{key}[layer]", value, holds)
            if code is not None:
                return code
    raise UnrecognisedError(
        type(view.reference.model).__name__,
        f"some layers have {what} and no per-layer list of the config says which.",
        "that rule",
    )


def _code(place: str, values: Sequence[Any], holds: Sequence[bool]) -> str | None:
    with_it = {repr(value): value for value, held in zip(values, holds, strict=True) if held}
    without = {repr(value) for value, held in zip(values, holds, strict=True) if not held}
    if set(with_it) & without or len(with_it) != 1:
        return None
    value = next(iter(with_it.values()))
    if isinstance(value, str):
        return f"{place} == {literal(value)}"
    return place if value else f"not {place}"
