"""Errors by token position as curves of bounded size, with what the positions mean marked on them.

A window that is off by one shows from its length on, a chunk that forgets state at its first token, a wrong stretch of
the rotary embedding from the original length on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rtp_runtime.check.probe_table import allowed
from rtp_runtime.check.report import NOT_FINITE, Curve, Mark

if TYPE_CHECKING:
    from rtp_runtime.check.compare import LogitsError
    from rtp_runtime.check.probe_table import ProbeTable, Tolerance
    from rtp_runtime.check.session import Session

MAX_POINTS = 512
MAX_CURVES = 6
"""Quantities of modules of which curves are kept."""
MAX_MARKS = 24


def thin(errors: Mapping[int, float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """(positions, errors): at most `MAX_POINTS`, of each stretch of positions the largest error, where it stands."""
    places = sorted(errors)
    size = math.ceil(len(places) / MAX_POINTS) or 1
    stretches = (places[start : start + size] for start in range(0, len(places), size))
    kept = [max(stretch, key=lambda place: errors[place]) for stretch in stretches]
    return tuple(kept), tuple(_short(errors[place]) for place in kept)


def _short(error: float) -> float:
    """Four digits are enough for a picture."""
    return float(f"{error:.3e}") if math.isfinite(error) else NOT_FINITE


def logits_curve(session: Session, prompt: str, what: str, error: LogitsError, chunk: int | None = None) -> Curve:
    """The logits' error over one prompt. `chunk`: tokens of a prefill chunk, where its ends are known."""
    errors = {} if error.rows is None else dict(enumerate(error.rows.tolist()))
    positions, values = thin(errors)
    ends = _ends(chunk, max(errors, default=0))
    marks = (*marks_of(session, max(errors, default=0)), *ends)
    return Curve("logits", what, None, prompt, positions, values, session.noise.logits_tolerance, marks)


def module_curves(session: Session, table: ProbeTable, tolerance: Tolerance, accused: Iterable[str]) -> list[Curve]:
    """Of the accused modules, then of those closest to their tolerance, one curve over the worst prompt each."""
    keys = table.keys()
    first = list(accused)
    order = sorted(
        (key for key in keys if math.isfinite(table.worst(key)[1].error) or key.module in first),
        key=lambda key: (
            first.index(key.module) if key.module in first else len(first),
            -table.worst(key)[1].error / allowed(key, tolerance),
        ),
    )
    curves = []
    for key in order[:MAX_CURVES]:
        prompt, probe = table.worst(key)
        positions, errors = thin(probe.output.by_token())
        if any(errors):
            marks = marks_of(session, positions[-1])
            layer, most = table.layer(key.module), allowed(key, tolerance)
            curves.append(Curve(key.module, key.what, layer, prompt, positions, errors, most, marks))
    return curves


def marks_of(session: Session, last: int) -> tuple[Mark, ...]:
    """Where, up to the position `last`, the model sees or rotates otherwise than before."""
    windows = sorted({kind.window for kind in session.kinds if kind.window is not None})
    marks = [Mark(window, f"window {window}") for window in windows]
    original = original_length(session.reference.config)
    if original is not None:
        marks.append(Mark(original, f"original length {original}"))
    return tuple(mark for mark in marks if 0 < mark.position <= last)


def original_length(config: Any) -> int | None:
    """The length of texts before the rotary embedding was stretched, where the config says one."""
    text = config.get_text_config()
    for name in ("rope_parameters", "rope_scaling"):
        value = getattr(text, name, None)
        for entry in (value, *(value.values() if isinstance(value, Mapping) else ())):
            if isinstance(entry, Mapping) and entry.get("original_max_position_embeddings"):
                return int(entry["original_max_position_embeddings"])
    original = getattr(text, "original_max_position_embeddings", None)
    return int(original) if original else None


def _ends(chunk: int | None, last: int) -> tuple[Mark, ...]:
    if not chunk or last // chunk > MAX_MARKS:
        return ()
    return tuple(Mark(place, f"chunk of {chunk}") for place in range(chunk, last + 1, chunk))
