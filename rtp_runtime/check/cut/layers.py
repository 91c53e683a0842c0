"""Which layers to keep, and the config whose layers are these: found by trying, on the meta device.

No key is known by its meaning. Per-layer lists are sub-selected; a number that says where a kind of layer begins, or
how often it comes, is found by trying values until every layer's signature is the wanted one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rtp_runtime.check.cut.edits import Edits, KeyPath, TextPart
from rtp_runtime.check.cut.outline import Outline, by_kind, outline, place_settings
from rtp_runtime.errors import NotJudgedError, UsageError

KINDS = "kinds"
MAX_KEYS = 3
"""Numbers of a config that are changed at most to get one sequence of layers."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Chosen:
    """The layers that are kept, and how the config says so."""

    layers: tuple[int, ...]
    """Their indices in the whole model, in order."""
    edits: Edits
    num_layers: int
    """Of the whole model."""
    kinds: tuple[tuple[int, ...], ...]
    """All layers of the whole model by kind."""
    note: str = ""
    """Where these are not the layers that were asked for: why."""


def parse_layers(text: str, num_layers: int) -> tuple[int, ...] | None:
    """Indices of `--layers`: "4" (the first four), "0-3,27" (these); None for "kinds".

    Raises:
        UsageError: not one of these, or a layer that the model does not have.
    """
    if text.strip() == KINDS:
        return None
    if text.strip().isdecimal():
        count = int(text)
        if not 1 <= count <= num_layers:
            raise UsageError(f"--layers {text}: the model has {num_layers} layers; give 1 to {num_layers}")
        return tuple(range(count))
    found: set[int] = set()
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None:
            raise UsageError(
                f"--layers {text!r}: {piece.strip()!r} is no layer; give a count (4), layers (0-3,27) or {KINDS!r}"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= num_layers:
            raise UsageError(f"--layers {text}: the model has layers 0 to {num_layers - 1}, not {piece.strip()}")
        found |= set(range(first, last + 1))
    return tuple(sorted(found))


def choose_layers(part: TextPart, text: str) -> Chosen:
    """The layers that `--layers` names and the edits that leave a model of just these.

    Raises:
        UsageError: see `parse_layers`.
        NotJudgedError: transformers cannot build the model.
    """
    placed = place_settings(part)
    whole = outline(part, placed=placed)
    kinds = by_kind(whole.signatures)
    total = len(whole.layers)
    asked = parse_layers(text, total)
    wanted = asked if asked is not None else tuple(sorted(places[0] for places in kinds))
    everything = tuple(map(tuple, kinds))
    if wanted == tuple(range(total)):
        return Chosen(wanted, {}, total, everything)
    search = _Search(part, whole, placed)
    edits = search.edits_for(wanted)
    if edits is not None:
        return Chosen(wanted, edits, total, everything)
    return _prefix(search, wanted, kinds)


def edits_for_layers(part: TextPart, wanted: tuple[int, ...]) -> Edits | None:
    """Edits that leave a model of these layers of the config; None where there are none.

    Raises:
        NotJudgedError: transformers cannot build the model.
    """
    placed = place_settings(part)
    whole = outline(part, placed=placed)
    if max(wanted) >= len(whole.layers):
        return None
    return {} if wanted == tuple(range(len(whole.layers))) else _Search(part, whole, placed).edits_for(wanted)


def _prefix(search: _Search, wanted: Sequence[int], kinds: Sequence[Sequence[int]]) -> Chosen:
    """The fewest leading layers that show every kind among the wanted ones."""
    needed = [places for places in kinds if set(places) & set(wanted)]
    depth = max(places[0] for places in needed) + 1
    total = len(search.whole.layers)
    note = f"no edit of the config leaves layers {', '.join(map(str, wanted))} alone, so the first {{}} are kept"
    for count in range(depth, total):
        edits = search.edits_for(tuple(range(count)))
        if edits is not None:
            return Chosen(tuple(range(count)), edits, total, tuple(map(tuple, kinds)), note.format(count))
    raise NotJudgedError(
        f"--layers {','.join(map(str, wanted))}: no edit of the config leaves a model of these layers, nor of the "
        f"first {depth} or more; check all layers, or fewer experts (--experts)"
    )


class _Search:
    """Edits of one config that give wanted layers."""

    def __init__(self, part: TextPart, whole: Outline, placed: frozenset[tuple[str, str]]) -> None:
        self.part = part
        self.whole = whole
        self._placed = placed

    def edits_for(self, wanted: tuple[int, ...]) -> Edits | None:
        """Edits after which the model's layers are `wanted` of the whole model's, in order; None if none are found."""
        best: tuple[int, Edits] | None = None
        for edits in self._with_lists(wanted):
            wrong = self._num_wrong(edits, wanted)
            if wrong == 0:
                return edits
            if wrong is not None and (best is None or wrong < best[0]):
                best = wrong, edits
        return None if best is None else self._with_numbers(wanted, *best)

    def _with_lists(self, wanted: tuple[int, ...]) -> list[Edits]:
        """The number of layers and the lists by layer set; lists of layers, in each way to count them."""
        total = len(self.whole.layers)
        base: Edits = {self.part.key("num_hidden_layers"): len(wanted)}
        indices: list[tuple[KeyPath, list[int]]] = []
        for path, values in self.part.lists():
            tail = len(values) - total
            if 0 <= tail <= 2 and total > 1:  # layers that only predict further tokens may stand at the end
                base[path] = [*(values[layer] for layer in wanted), *values[total:]]
            elif values and all(type(value) is int and 0 <= value <= total for value in values):
                indices.append((path, values))
        ways: list[Callable[[list[int]], list[int]]] = [
            lambda values: [place for place, layer in enumerate(wanted) if layer in values],
            lambda values: [place + 1 for place, layer in enumerate(wanted) if layer + 1 in values],
        ]
        return [base | {path: way(values) for path, values in indices} for way in ways] if indices else [base]

    def _with_numbers(self, wanted: tuple[int, ...], wrong: int, edits: Edits) -> Edits | None:
        keys = [path for path, value in self.part.integers() if value <= len(self.whole.layers) and path not in edits]
        for _ in range(MAX_KEYS):
            tried: list[tuple[int, KeyPath, int]] = []
            for path in keys:
                for value in range(len(wanted) + 2):
                    if value != self.part.get(path) and path not in edits:
                        still = self._num_wrong(edits | {path: value}, wanted)
                        if still == 0:
                            return edits | {path: value}
                        if still is not None:
                            tried.append((still, path, value))
            best = min(tried, default=None)
            if best is None or best[0] >= wrong:
                return None
            wrong, edits = best[0], edits | {best[1]: best[2]}
        return None

    def _num_wrong(self, edits: Edits, wanted: tuple[int, ...]) -> int | None:
        """How many layers are not the wanted ones; None where there is no such model, or its surroundings change."""
        try:
            found = outline(self.part, edits, self._placed)
        except NotJudgedError:
            return None
        if len(found.layers) != len(wanted) or not found.same_around(self.whole):
            return None
        pairs = zip(found.signatures, wanted, strict=True)
        return sum(signature != self.whole.signatures[layer] for signature, layer in pairs)
