"""What our model gave at and around the accused module, kept: given the reference's layer input, on one prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rtp_runtime.check.capture import Capture
from rtp_runtime.check.names import layer_of
from rtp_runtime.check.pairs import Pairing, pair_closest, pair_tensors
from rtp_runtime.check.probe_table import CORE, ENTRIES, FED, INPUT, LOGITS, OUTPUT, K, ProbeKey, Q, V
from rtp_runtime.check.probes import ProbeRun, Rows, closed_entries
from rtp_runtime.check.rows import Segment
from rtp_runtime.check.selections import Choices

Pairs = list[tuple[Tensor, Tensor]]
"""Ours and the other side's values of one quantity, [rows, …] each."""


@dataclass(slots=True)
class Kept:
    """One quantity of ours: the tensors, the rows of the reference that they stand against, and how to find these."""

    ours: list[Rows] = field(default_factory=list)
    index: list[Tensor] = field(default_factory=list)
    repeated: bool = False
    pick: Callable[[Capture], Tensor] | None = None
    """Of a selection: the other side's, for these rows."""

    def add(self, ours: Rows, index: Tensor) -> None:
        """More rows; of what is split in two ways, the module's own comes first and is kept."""
        if any(bool(torch.isin(index, other).any()) for other in self.index):
            return
        self.ours.append(ours)
        self.index.append(index)

    def values(self) -> tuple[Rows, Tensor]:
        """All rows in the order of the prompt."""
        index = torch.cat(self.index)
        order = index.argsort()
        count = min(len(rows) for rows in self.ours)
        return tuple(torch.cat([rows[i] for rows in self.ours])[order] for i in range(count)), index[order]


class KeepingRun(ProbeRun):
    """A probe run that keeps what it compares in some modules. `wanted`: whether a module is one of them."""

    def __init__(self, *args: Any, wanted: Callable[[str], bool], prompt: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wanted = wanted
        self._prompt = prompt
        self.kept: dict[ProbeKey, Kept] = {}
        self.ties: dict[int | None, Tensor] = {}
        """Layer -> [tokens] bool: those that chose among equals."""

    def compare(self, key: ProbeKey, segment: Segment, ours: Rows, reference: Rows) -> None:
        self._keep(key, segment.prompt, [t[segment.rows] for t in ours], segment.index)
        super().compare(key, segment, ours, reference)

    def compare_repeats(self, key: ProbeKey, segment: Segment, ours: Rows, reference: Rows) -> None:
        self._keep(key, segment.prompt, [t[segment.rows] for t in ours], segment.index)
        if key in self.kept:
            self.kept[key].repeated = True
        super().compare_repeats(key, segment, ours, reference)

    def compare_choices(
        self, key: ProbeKey, part: Segment, choices: Choices, ties: Tensor, pick: Callable[[Capture], Tensor]
    ) -> None:
        if self._wanted(key.module) and key not in self.kept and part.prompt == self._prompt:
            self._keep(key, part.prompt, [choices.ours], part.index)
            self.kept[key].pick = pick
        super().compare_choices(key, part, choices, ties, pick)

    def compare_entries(
        self,
        key: ProbeKey,
        segment: Segment,
        ours: Rows,
        entries: Rows,
        ratio: int,
        inputs: tuple[Rows, Rows] = ((), ()),
    ) -> None:
        closed = closed_entries(segment, ratio)
        self._keep(key, closed.prompt, [t[closed.rows] for t in ours], closed.index)
        super().compare_entries(key, segment, ours, entries, ratio, inputs)

    def leave_out(self, module: str, segment: Segment, ties: Tensor) -> None:
        super().leave_out(module, segment, ties)
        if bool(ties.any()):
            layer = layer_of(module, self.table.layers)
            length = self.captures[segment.prompt].num_tokens
            self.ties.setdefault(layer, torch.zeros(length, dtype=torch.bool))[segment.index[ties]] = True

    def _keep(self, key: ProbeKey, prompt: str, ours: Sequence[Tensor], index: Tensor) -> None:
        if prompt == self._prompt and self._wanted(key.module) and len(index):
            # Ops and models may go on to write where these lie.
            self.kept.setdefault(key, Kept()).add(tuple(t.clone() for t in ours), index)


@dataclass(slots=True)
class Evidence:
    """Our side of one layer on one prompt."""

    kept: dict[ProbeKey, Kept]
    ties: dict[int | None, Tensor]

    def pairs(self, key: ProbeKey, capture: Capture, layer: int | None) -> Pairs | None:
        """Ours and this capture's values; None where there is nothing comparable in it."""
        kept = self.kept[key]
        ours, index = kept.values()
        if kept.pick is not None:
            other = kept.pick(capture)
            if not len(other):
                return None
            return [tuple(side.float() for side in Choices(ours[0], other).sets())]  # type: ignore[list-item]
        theirs = _theirs(key, capture)
        if theirs is None or any(len(t) <= int(index.max()) for t in theirs):
            return None
        match = pair_closest if kept.repeated else pair_tensors
        pairing: Pairing = match(list(ours), [t[index] for t in theirs])
        if not pairing.pairs:
            return None
        out = self.ties.get(layer)
        keep = torch.ones(len(index), dtype=torch.bool)
        if out is not None and key.what not in (ENTRIES, LOGITS) and len(out) > int(index.max()):
            keep = ~out[index]
        return [(p.ours[keep].float().flatten(1), p.reference[keep].float().flatten(1)) for p in pairing.pairs]


def _theirs(key: ProbeKey, capture: Capture) -> list[Tensor] | None:
    """The tensors that a capture has for one quantity."""
    if key.what in (Q, K, V, CORE):
        call = capture.attention.get(key.module)
        if call is None:
            return None
        return [{Q: call.q, K: call.k, V: call.v, CORE: call.output}[key.what].flatten(1)]
    calls = capture.all_calls(key.module)
    if not calls:
        return None
    first = calls[0]
    if key.what == ENTRIES or (key.what == OUTPUT and not first.outputs and first.entries):
        return list(first.entries)
    if key.what == FED and first.given and not first.inputs:
        return list(first.given)
    if key.what in (INPUT, FED):
        return list(first.inputs[:1])
    return [tensor for call in calls for tensor in call.outputs]
