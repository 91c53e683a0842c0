"""What our ops are heard to do, compared with the reference's attention calls, compressors and selections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.ops.attention import Span
from rtp_runtime.check.capture import AttentionCall, Capture
from rtp_runtime.check.names import layer_of, parent_of
from rtp_runtime.check.probe_table import CORE, ENTRIES, SELECTION, K, ProbeKey, Q, V
from rtp_runtime.check.recorder import SCORES
from rtp_runtime.check.rows import Segment
from rtp_runtime.check.selections import Choices, is_selection, tied

if TYPE_CHECKING:
    from rtp_runtime.check.probes import ProbeRun

LATENT, COMPRESSED, PAGED = "latent_attention", "compressed_attention", "paged_attention"


@dataclass(slots=True)
class Chosen:
    """Scores of some rows of the step and how many of the best were chosen: [rows, groups, places], -inf = not seen."""

    rows: slice
    scores: Tensor
    k: int
    tokens_per_place: int


class OpSeam:
    """Listens to the ops of one model while `probes` runs its steps."""

    def __init__(self, probes: ProbeRun) -> None:
        self._probes = probes
        self._batch: ForwardBatch | None = None
        self._mixers: set[str] = set()
        self._scored: tuple[slice, int] = (slice(0, 0), 1)
        self._chosen: dict[int | None, list[Chosen]] = {}
        """Layer -> what was chosen from, part by part; of the current step."""
        self._selector: int | None = None
        """The last layer that chose."""
        self.exercised: dict[int, tuple[int, int]] = {}
        """Layer -> (places chosen at most, places that the row which saw most could choose from)."""

    def begin(self, batch: ForwardBatch) -> None:
        """A step begins."""
        self._batch = batch
        self._chosen.clear()
        self._mixers.clear()

    @property
    def mixers(self) -> frozenset[str]:
        """The blocks in which tokens were mixed in the last step."""
        return frozenset(self._mixers)

    def mixes(self, module: str) -> bool:
        """Whether tokens are mixed (attention, recurrence) in the block that the module stands in."""
        return self._block(module) in self._mixers

    def heard(self, component: str, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """An op has run."""
        if not self._probes.segments:
            return
        if op == "write_kv":
            self._written(component, K, args[0], lambda call: call.k)
            self._written(component, V, args[1], lambda call: call.v)
        elif op == "write_state":
            self._state_written(component, args[0], args[1])
        elif op in (PAGED, LATENT, COMPRESSED):
            self._mixers.add(self._block(component))
            self._attended(component, op, args, kwargs, result)
        elif op == "select":
            self._selected(component, args[0], int(args[1] if len(args) > 1 else kwargs["k"]))
        elif op.endswith(SCORES):
            self._note_scored(args, kwargs, result)
        else:
            self._mixers.add(self._block(component))

    def _block(self, name: str) -> str:
        """The module directly in a layer that `name` is, or stands in."""
        for layer in self._probes.table.layers:
            if name.startswith(f"{layer}."):
                return f"{layer}.{name[len(layer) + 1 :].partition('.')[0]}"
        return name

    def _attended(
        self, component: str, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor
    ) -> None:
        q, span = args[0], args[3]
        rows = slice(span.rows.start, span.rows.stop)
        selection = kwargs.get("selection")
        if selection is not None:
            ratio = int(kwargs.get("tokens_per_place", 1))
            self._judge_selection(component, rows, selection, ratio, entries=op == COMPRESSED)
        if op != LATENT:  # whose queries may be in another arrangement
            self._compare(component, Q, q, rows, lambda call: call.q)
        self._compare(component, CORE, output, rows, lambda call: call.output)

    def _written(self, component: str, what: str, values: Tensor, pick: Callable[[AttentionCall], Tensor]) -> None:
        self._compare(component, what, values, slice(0, len(values)), pick)

    def _state_written(self, component: str, values: Tensor, view: StateView) -> None:
        """Entries of compressed tokens, where the reference has a module that gives them back."""
        if view.tokens_per_entry == 1:
            return
        for segment in self._probes.segments:
            calls, name = self._probes.captures[segment.prompt].calls, component
            while name and name not in calls:
                name = parent_of(name)
            if name and calls[name].entries:
                key = ProbeKey(name, ENTRIES)
                self._probes.compare_entries(
                    key, segment, (values.flatten(1),), calls[name].entries, view.tokens_per_entry
                )

    def _compare(
        self, component: str, what: str, ours: Tensor, rows: slice, pick: Callable[[AttentionCall], Tensor]
    ) -> None:
        for segment in self._probes.segments:
            found = self._attention_call(component, segment.prompt)
            if found is not None:
                part = _part(segment, rows)
                self._probes.compare(ProbeKey(found[0], what), part, (ours.flatten(1),), (pick(found[1]),))

    def _attention_call(self, component: str, prompt: str) -> tuple[str, AttentionCall] | None:
        """The reference's attention call by the module in which our component stands."""
        calls, name = self._probes.captures[prompt].attention, component
        while name and name not in calls:
            name = parent_of(name)
        return (name, calls[name]) if name else None

    def _note_scored(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], scores: Tensor) -> None:
        values = (*args, *kwargs.values())
        span = next((value for value in values if isinstance(value, Span)), None)
        rows = slice(0, len(scores)) if span is None else slice(span.rows.start, span.rows.stop)
        view = next((value for value in values if isinstance(value, StateView)), None)
        self._scored = rows, 1 if view is None else view.tokens_per_entry

    def _selected(self, component: str, scores: Tensor, k: int) -> None:
        rows, ratio = self._scored
        layer = layer_of(component, self._probes.table.layers)
        self._selector = layer
        self._chosen.setdefault(layer, []).append(Chosen(rows, scores, k, ratio))
        seen = int((scores > float("-inf")).sum(dim=-1).max()) if scores.numel() else 0
        if layer is not None:
            self.exercised[layer] = (k, max(seen, self.exercised.get(layer, (k, 0))[1]))

    def _judge_selection(self, component: str, rows: slice, selection: Tensor, ratio: int, entries: bool) -> None:
        for segment in self._probes.segments:
            found = self._attention_call(component, segment.prompt)
            part = _part(segment, rows)
            if found is None or found[1].visible is None or not len(part.index):
                continue
            visible = found[1].visible  # [tokens, 1 or heads, keys]
            tokens = len(visible)
            ours, name = selection[part.rows], found[0]
            keys = slice(tokens, None) if entries else slice(tokens)

            def pick(capture: Capture, name: str = name, part: Segment = part, keys: slice = keys) -> Tensor:
                seen = capture.attention[name].visible
                return torch.empty(0) if seen is None else seen[part.index, :, keys]

            places = visible.shape[-1] - tokens
            held = _known(ours, places) if entries else _as_tokens(ours, ratio, part.index, tokens)
            self._compare_choices(name, part, rows, Choices(held, visible[part.index, :, keys]), ratio, pick)

    def _compare_choices(
        self,
        attention: str,
        part: Segment,
        rows: slice,
        choices: Choices,
        ratio: int,
        pick: Callable[[Capture], Tensor],
    ) -> None:
        module = self._selecting_module(attention, part.prompt)
        changed = choices.changed
        ties = torch.zeros_like(changed)
        step_rows = part.rows + rows.start
        for place in changed.nonzero().flatten().tolist():
            ties[place] = self._is_tie(int(step_rows[place]), choices.row(place), ratio)
        self._probes.compare_choices(ProbeKey(module, SELECTION), part, choices, ties, pick)
        self._probes.leave_out(attention, part, ties)

    def _is_tie(self, row: int, choices: Choices, ratio: int) -> bool:
        for chosen in self._chosen.get(self._selector, ()):
            if chosen.rows.start <= row < chosen.rows.stop:
                scores = chosen.scores[row - chosen.rows.start][None]
                unit = max(ratio, chosen.tokens_per_place) if choices.of_tokens else 1
                return bool(tied(choices.in_places(unit), scores, chosen.k)[0])
        return False

    def _selecting_module(self, attention: str, prompt: str) -> str:
        """The reference's module that gives the selection of this attention back; itself if it takes another's."""
        calls = self._probes.captures[prompt].calls
        inside = [name for name in calls if name.startswith(f"{attention}.")]
        return next((name for name in inside if any(map(is_selection, calls[name].outputs))), attention)


def _part(segment: Segment, rows: slice) -> Segment:
    """The rows of a segment that a call served, counted from the call's first row."""
    here = (segment.rows >= rows.start) & (segment.rows < rows.stop)
    return Segment(segment.prompt, segment.rows[here] - rows.start, segment.index[here])


def _known(selection: Tensor, places: int) -> Tensor:
    """The selection [rows, groups, k] without places that the reference does not have."""
    return selection.masked_fill(selection >= places, -1)


def _as_tokens(selection: Tensor, ratio: int, index: Tensor, tokens: int) -> Tensor:
    """[rows, groups, tokens] bool: which tokens the selected places of `ratio` tokens hold, up to the row's own."""
    places = -(-tokens // ratio)
    mask = torch.zeros(*selection.shape[:2], places + 1, dtype=torch.bool)
    mask.scatter_(-1, torch.where((selection < 0) | (selection >= places), places, selection), True)
    held = mask[..., :places].repeat_interleave(ratio, dim=-1)[..., :tokens]
    return held & (torch.arange(tokens) <= index[:, None, None])
