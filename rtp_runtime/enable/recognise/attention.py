"""Grouped attention, from the query, key and value that reach the attention function back to the projections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rtp_runtime.enable.blocks import Attention, Projection
from rtp_runtime.enable.blocks.attention import HeadNorm
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import express
from rtp_runtime.enable.recognise.attention_core import Core, recognise_core, scale_code
from rtp_runtime.enable.recognise.heads import find_sizes
from rtp_runtime.enable.recognise.norm import recognise_norm
from rtp_runtime.enable.recognise.output import recognise_output
from rtp_runtime.enable.recognise.paths import Path, Tracer
from rtp_runtime.enable.recognise.query_factor import query_factor
from rtp_runtime.enable.recognise.rotary import stays_wide
from rtp_runtime.enable.recognise.view import View
from rtp_runtime.enable.recording import AttentionCall, Call
from rtp_runtime.enable.sizes import Sizes

WINDOW_KEY = "sliding_window"
"""Read by transformers' mask functions rather than by the modeling file."""


def is_attention(view: View, name: str) -> bool:
    """Whether it, or the one module inside it that does, attends: by the replaceable function or written out."""
    return len(_inside(view, name)) == 1


def _inside(view: View, name: str) -> list[str]:
    return [found for found in view.recording.attention if found == name or found.startswith(f"{name}.")]


@dataclass(frozen=True, eq=False)
class _Seen:
    """One attention block as it was seen to run."""

    view: View
    name: str
    """Of the module that attends."""
    call: AttentionCall
    calls: Sequence[Call]
    """Of the modules inside."""

    @property
    def label(self) -> str:
        return self.view.label(self.name)

    def refuse(self, reason: str, needs: str) -> UnrecognisedError:
        return UnrecognisedError(self.label, reason, needs)


def recognise_attention(view: View, name: str) -> Attention:
    """The attention block `name`.

    Raises:
        UnrecognisedError: a part of it is not one of ours, named.
    """
    (inside,) = _inside(view, name)
    call = view.recording.attention[inside]
    seen = _Seen(view, inside, call, view.recording.inside(inside))
    if call.value.shape[-1] != call.key.shape[-1]:
        raise seen.refuse("its values have another head dim than its keys.", "a cache of two widths")
    q, k, v = (_trace(seen, what, x) for what, x in (("query", call.query), ("key", call.key), ("value", call.value)))
    _check_turns(seen, q, k, v)
    core = recognise_core(view, inside, call)
    sizes = find_sizes(view, view.module(inside), call)
    return Attention(
        class_name=view.class_name(inside),
        q=q.projection,
        k=k.projection,
        v=v.projection,
        sizes=sizes,
        groups=_groups(seen, (q.projection, k.projection, v.projection), sizes),
        **_core_fields(seen, core),
        **_turned(seen, k, sizes),
        q_norm=_norm(seen, q),
        k_norm=_norm(seen, k),
        v_norm=_norm(seen, v),
        query_factor=None if q.factor is None or q.constant is not None else query_factor(view, inside, q.factor),
        query_scale=_query_scale(seen, q),
        inner=inside.removeprefix(f"{name}.") if inside != name else None,
        outer_class=view.class_name(name) if inside != name else None,
        **recognise_output(view, name, inside, call, seen.calls),
    )


def _trace(seen: _Seen, what: str, target: Any) -> Path:
    path = Tracer(seen.view, seen.name, seen.calls).trace(target)
    if path is None:
        raise seen.refuse(
            f"its {what} is no projection that is normed per head or whole and turned by a known rotary layout.",
            f"an op for how it makes its {what}",
        )
    return path


def _check_turns(seen: _Seen, q: Path, k: Path, v: Path) -> None:
    if v.turn is not None or k.constant != 1.0 or v.constant != 1.0:
        raise seen.refuse("its values are turned, or keys or values scaled.", "attention whose values are changed")
    ways = [(p.turn.table.key, p.turn.layout, p.turn.inverse) if p.turn else None for p in (q, k)]
    if ways[0] != ways[1]:
        raise seen.refuse("queries and keys are treated differently.", "a rotary of its own")


def _query_scale(seen: _Seen, q: Path) -> str | None:
    """Code of the number that queries were multiplied by before attention; None without one."""
    if q.constant in (None, 1.0):
        return None
    assert q.constant is not None
    return scale_code(seen.view, seen.name, seen.call, q.constant) or "self.head_dim**-0.5"


def _core_fields(seen: _Seen, core: Core) -> dict[str, Any]:
    window = core.window
    code = None
    if window is not None:
        found = express(window, seen.view.config, [*seen.view.reference.reads, WINDOW_KEY], "window|local|chunk")
        if found is None:
            block = type(seen.view.reference.model).__name__
            raise UnrecognisedError(block, f"its window of {window} follows from none of the config keys.", "that rule")
        code = found.code
    return {
        "scale": core.scale,
        "soft_cap": core.soft_cap,
        "sinks": core.sinks,
        "alibi": core.alibi,
        "window": code,
    }


def _turned(seen: _Seen, k: Path, sizes: Sizes) -> dict[str, Any]:
    if k.turn is None:
        return {}
    table = k.turn.table
    share = None
    if 2 * table.inv_freq.numel() < seen.call.key.shape[-1]:
        share = _share(seen, table.key, 2 * table.inv_freq.numel(), sizes)
    return {
        "rotary": f'Rotary("{k.turn.layout}")',
        "inverse": k.turn.inverse,
        "wide_turn": stays_wide(seen.view, table.module),
        "table": table.key,
        "partial": share,
    }


def _share(seen: _Seen, key: str, width: int, sizes: Sizes) -> str:
    """Code of how many dimensions of a head are turned."""
    config, dim = seen.view.config, seen.call.key.shape[-1]
    rope = getattr(config, "rope_parameters", None) or {}
    own = rope.get(key, {}) if key else rope
    place = "config.rope_parameters[kind]" if key else "config.rope_parameters"
    factor = own.get("partial_rotary_factor")
    if factor is not None and int(dim * factor) == width:
        return f'int({sizes.name} * {place}["partial_rotary_factor"])'
    for name in ("rotary_dim", "qk_rope_head_dim"):
        if getattr(config, name, None) == width:
            return f"config.{name}"
    raise seen.refuse(f"it turns {width} of {dim} dimensions, which no config key says.", "that rule")


def _norm(seen: _Seen, path: Path) -> HeadNorm | None:
    if path.norm is None:
        return None
    flat = path.norm.inputs[0].ndim == 3
    name = path.norm.name.removeprefix(f"{seen.name}.")
    if "." in name:
        raise seen.refuse(f"its norm {name} stands in a module of its own.", "that module")
    return HeadNorm(name, recognise_norm(seen.view, path.norm.name), flat, path.norm_after_rotary)


def _groups(seen: _Seen, parts: Sequence[Projection], sizes: Sizes) -> str | None:
    """Code of the number of groups to which a fused tensor deals its parts out."""
    counts = {part.groups for part in parts if not part.whole}
    if counts <= {1}:
        return None
    if len(counts) > 1 or len({part.name for part in parts}) > 1:
        raise seen.refuse("its fused projection mixes two packings.", "that packing")
    count = counts.pop()
    known = {seen.call.key.shape[1]: sizes.kv_heads, seen.call.query.shape[1]: sizes.heads}
    return known.get(count, str(count))
