"""Three runs of one prompt whose modules are given the same inputs: exact, narrow, and ours.

Exact is the float32 reference with rounded weights, narrow the reference in the serving dtype. What a layer, a module
in it, the last norm and the head are given is exact's own input there, rounded to the serving dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rtp_runtime.check.capture import Call, Capture
from rtp_runtime.check.names import layer_of
from rtp_runtime.check.ours import OurModel
from rtp_runtime.check.pairs import Pair, Pairing, pair_tensors
from rtp_runtime.check.probe_table import INPUT, ProbeKey
from rtp_runtime.check.probes import Match, ProbeRun, Rows
from rtp_runtime.check.reference import Reference, with_first_tensor
from rtp_runtime.check.rows import RowMatcher, Segment
from rtp_runtime.check.seam import OpSeam
from rtp_runtime.check.selections import Choices, is_selection
from rtp_runtime.check.serving.table import RatioTable
from rtp_runtime.check.splits import FusedOutputs

Change = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Twin:
    """What the reference says of one prompt, exactly and in the serving dtype, from the same layer inputs."""

    prompt: str
    ids: tuple[int, ...]
    exact: Capture
    narrow: Capture
    exact_logits: Tensor
    """[tokens, vocab]"""
    narrow_logits: Tensor
    flips: dict[int, Tensor]
    """Layer -> [tokens] bool: tokens for which the two chose other experts or places."""


def capture_twin(prompt: str, ids: Sequence[int], exact: Reference, narrow: Reference, fixed: Iterable[str]) -> Twin:
    """Run both over a prompt. `fixed`: the modules whose input is to be the same, in all runs."""
    fixed, dtype = list(fixed), narrow.dtype
    with given_inputs(exact, fixed, lambda _, value: value.to(dtype).to(value)):
        logits, wide = exact.capture(ids)
    with given_inputs(narrow, fixed, lambda name, value: wide.calls[name].inputs[0].reshape(value.shape).to(value)):
        narrow_logits, small = narrow.capture(ids)
    return Twin(prompt, tuple(ids), wide, small, logits, narrow_logits, reference_flips(wide, small, exact.layers))


@contextmanager
def given_inputs(reference: Reference, modules: Iterable[str], change: Change) -> Iterator[None]:
    """Change the first tensor that these modules are given."""

    def hook(name: str) -> Callable[..., Any]:
        def replace(module: nn.Module, args: Any, kwargs: Any) -> Any:
            first = next(item for item in (*args, *kwargs.values()) if isinstance(item, Tensor))
            return with_first_tensor(args, kwargs, change(name, first))

        return replace

    with ExitStack() as stack:
        for name in modules:
            handle = reference.modules[name].register_forward_pre_hook(hook(name), with_kwargs=True)
            stack.callback(handle.remove)
        yield


def reference_flips(exact: Capture, narrow: Capture, layers: Any) -> dict[int, Tensor]:
    """Layer -> [tokens] bool: where the dtype alone made the reference choose otherwise."""
    found: dict[int, Tensor] = {}
    for name, one, other in _choices(exact, narrow):
        layer = layer_of(name, layers)
        if layer is not None and len(one) == len(other) == exact.num_tokens:
            changed = Choices(other, one).changed
            found[layer] = found.get(layer, torch.zeros_like(changed)) | changed
    return found


def _choices(exact: Capture, narrow: Capture) -> Iterator[tuple[str, Tensor, Tensor]]:
    for name, call in exact.calls.items():
        outputs = narrow.calls[name].outputs if name in narrow.calls else ()
        for one, other in zip(call.outputs, outputs, strict=False):
            if is_selection(one) and is_selection(other):
                yield name, one, other
    for name, attention in exact.attention.items():
        found = narrow.attention.get(name)
        if attention.visible is not None and found is not None and found.visible is not None:
            yield name, attention.visible, found.visible


@dataclass(slots=True)
class Flips:
    """Tokens of one layer for which rounding changed what was chosen."""

    ours: int = 0
    reference: int = 0
    tokens: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Of ours: how far the scores were apart that changed places, and their size."""


class ServingRun(ProbeRun):
    """Probes our model in the serving dtype with both captures of the reference."""

    table: RatioTable

    def __init__(
        self, model: OurModel, table: RatioTable, twin: Twin, fused: FusedOutputs, given: Mapping[str, str]
    ) -> None:
        """`given`: our modules -> the reference's module whose input they are given."""
        matcher = RowMatcher({twin.prompt: twin.ids})
        super().__init__(model.module, table, {twin.prompt: twin.exact}, matcher, fused, model.ratios)
        self._twin, self._given = twin, given
        self._boundaries = set()
        self._narrow = _counterparts(twin.exact, twin.narrow)
        self.flips: dict[int, Flips] = {}
        self.seam = _Seam(self)

    def _hooks(self, name: str, module: nn.Module) -> Iterator[Any]:
        if name in self._given:
            yield module.register_forward_pre_hook(self._graft(self._given[name]))
        yield from super()._hooks(name, module)

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        super()._begin(module, args)
        for layer, flipped in self._twin.flips.items():
            self._left_out[(self._twin.prompt, layer)] = flipped.clone()

    def compare(self, key: ProbeKey, segment: Segment, ours: Rows, reference: Rows) -> None:
        """As ever, but of no layer's input, which is the output of the layer before."""
        if key.what != INPUT:
            super().compare(key, segment, ours, reference)

    def pair(self, places: Segment, ours: Rows, reference: Rows, match: Match = pair_tensors) -> Pairing:
        """Pairs with the reference in the serving dtype beside them, where it has the same tensors."""
        pairing = super().pair(places, ours, reference, match)
        narrow = [self._narrow.get(id(tensor)) for tensor in reference]
        if not narrow or any(tensor is None for tensor in narrow):
            return pairing
        other = match([t[places.rows] for t in ours], [t[places.index] for t in narrow if t is not None])
        if len(other.pairs) != len(pairing.pairs):
            return pairing
        pairs = tuple(_beside(one, two) for one, two in zip(pairing.pairs, other.pairs, strict=True))
        return Pairing(pairs, pairing.unmatched, pairing.available, pairing.selections)

    def leave_out(self, module: str, segment: Segment, ties: Tensor) -> None:
        """Leave out and count the rows for which we chose otherwise."""
        layer = layer_of(module, self.table.layers)
        if layer is not None and bool(ties.any()):
            self.flips.setdefault(layer, Flips()).ours += int(ties.sum())
        super().leave_out(module, segment, ties)

    def judge_head(self, head: str, model: OurModel) -> None:
        """The output head on exact's last hidden state, rounded."""
        index = torch.arange(self._twin.exact.num_tokens)
        ours = model.logits(self._twin.exact.calls[head].inputs[0])
        pair = Pair(ours, self._twin.exact_logits, narrow=self._twin.narrow_logits)
        if ours.shape == pair.reference.shape:
            probe = self.table.probe(ProbeKey(head), self._twin.prompt)
            probe.add(Pairing((pair,)), index, torch.ones(len(index), dtype=torch.bool))

    def note_gap(self, layer: int | None, gap: float, size: float) -> None:
        """Keep by how much scores differed whose order changed."""
        if layer is not None:
            self.flips.setdefault(layer, Flips()).gaps.append((gap, size))


class _Seam(OpSeam):
    """Every change of a selection is left out, whatever the scores say; their gap is noted."""

    _probes: ServingRun

    def _is_tie(self, row: int, choices: Choices, ratio: int) -> bool:
        for chosen in self._chosen.get(self._selector, ()):
            if chosen.rows.start <= row < chosen.rows.stop:
                scores = chosen.scores[row - chosen.rows.start][None]
                unit = max(ratio, chosen.tokens_per_place) if choices.of_tokens else 1
                gap = _selection_gap(choices.in_places(unit), scores, chosen.k)
                if gap is not None:
                    self._probes.note_gap(self._selector, *gap)
        return True


def _selection_gap(choices: Choices, scores: Tensor, k: int) -> tuple[float, float] | None:
    """How far our scores of the places that one side chose alone are from the last of the k best, and its size."""
    one, other = choices.sets()
    groups = max(one.shape[1], scores.shape[1])
    one, other, scores = (tensor.expand(-1, groups, -1) for tensor in (one, other, scores))
    width = min(one.shape[-1], scores.shape[-1])
    disputed = (one ^ other)[..., :width]
    cut = scores.topk(min(k, scores.shape[-1]), dim=-1).values[..., -1:]
    gaps = (scores[..., :width] - cut).abs().masked_fill(~disputed, 0.0)
    gaps = gaps[torch.isfinite(gaps)]
    cut = cut[torch.isfinite(cut)]
    return (float(gaps.max()), float(cut.abs().max())) if gaps.numel() and cut.numel() else None


def _beside(one: Pair, other: Pair) -> Pair:
    """`one` with the reference of `other`; routes may show fewer experts on one side."""
    narrow, wide = other.reference, one.reference
    if narrow.shape != wide.shape and one.changed is not None:
        width = max(narrow.shape[1], wide.shape[1])
        ours, wide, narrow = (_widened(tensor, width) for tensor in (one.ours, wide, narrow))
        return Pair(ours, wide, one.changed, one.ties, narrow, one.gaps)
    if narrow.numel() != wide.numel() or one.ours.numel() != wide.numel():
        return one
    return Pair(one.ours, wide, one.changed, one.ties, narrow, one.gaps)


def _widened(tensor: Tensor, width: int) -> Tensor:
    return nn.functional.pad(tensor, (0, width - tensor.shape[1]))


def _counterparts(exact: Capture, narrow: Capture) -> dict[int, Tensor]:
    """`id` of exact's tensors -> the narrow reference's."""
    found: dict[int, Tensor] = {}

    def note(ones: Iterable[Tensor], others: Iterable[Tensor]) -> None:
        ones, others = tuple(ones), tuple(others)
        if [tensor.shape for tensor in ones] == [tensor.shape for tensor in others]:
            found.update(zip(map(id, ones), others, strict=True))

    for name in exact.calls.keys() & narrow.calls.keys():
        for one, other in zip(exact.all_calls(name), narrow.all_calls(name), strict=False):
            for side in Call.__slots__:
                note(getattr(one, side), getattr(other, side))
    for name in exact.attention.keys() & narrow.attention.keys():
        for side in ("q", "k", "v", "output"):
            note((getattr(exact.attention[name], side),), (getattr(narrow.attention[name], side),))
    return found
