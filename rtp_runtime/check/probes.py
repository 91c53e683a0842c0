"""Our side of the probes: hooks on modules named as the reference's, compared while the engine runs.

Each decoder layer is given the reference's input, so that an error is seen where it arises. Positions, state and
indices stay the engine's. Nothing of ours is kept: every output is compared at once and dropped. What ops do is heard
by `seam.OpSeam`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from rtp_kernel.batch import ForwardBatch
from rtp_runtime.bridge import bridged_blocks
from rtp_runtime.check.capture import Call, Capture
from rtp_runtime.check.compare import tensors_of
from rtp_runtime.check.names import holds_layers, is_inside, layer_of
from rtp_runtime.check.pairs import Pairing, pair_closest, pair_tensors
from rtp_runtime.check.probe_table import FED, INPUT, OUTPUT, ProbeKey, ProbeTable
from rtp_runtime.check.rows import RowMatcher, Segment
from rtp_runtime.check.seam import OpSeam
from rtp_runtime.check.selections import Choices
from rtp_runtime.check.splits import FusedOutputs

if TYPE_CHECKING:
    from rtp_runtime.check.ours import OurModel
    from rtp_runtime.check.session import Session

Rows = tuple[Tensor, ...]
Match = Callable[[Sequence[Tensor], Sequence[Tensor]], Pairing]


class ProbeRun:
    """Compares what our model computes in engine steps with captures of the reference, prompt by prompt.

    `ratios`: how many tokens one entry of a compressed state stands for, of all such states.
    """

    def __init__(
        self,
        module: nn.Module,
        table: ProbeTable,
        captures: Mapping[str, Capture],
        matcher: RowMatcher,
        fused: FusedOutputs,
        ratios: frozenset[int] = frozenset(),
    ) -> None:
        self._module = module
        self.table = table
        self.captures = captures
        self._matcher = matcher
        self._fused = fused
        self._ratios = ratios
        self._bridged = bridged_blocks(module)
        self._boundaries = boundaries(next(iter(captures.values())), table.layers)
        self.segments: list[Segment] = []
        self._num_rows = 0
        self._left_out: dict[tuple[str, int | None], Tensor] = {}
        self.tie_tokens: dict[str, int] = {}
        """Prompt -> its first token for which experts or keys changed by a tie."""
        self.seam = OpSeam(self)

    @classmethod
    def over(
        cls, session: Session, captures: Mapping[str, Capture], model: OurModel | None = None, **more: Any
    ) -> Self:
        """With a table of its own, over the session's cases of which there are captures. `model`: not the session's."""
        model, cases = model or session.model, {case.name: case for case in session.cases}
        table = ProbeTable(session.reference.layers, session.order, session.consumers)
        matcher = RowMatcher({name: cases[name].sequence for name in captures})
        fused = FusedOutputs(model.module, model.loaded.weights.layout, set(session.order))
        return cls(model.module, table, captures, matcher, fused, model.ratios, **more)

    @contextmanager
    def attached(self, ops: Any) -> Iterator[None]:
        """Probe every step that the engine runs inside the block. `ops`: the `RecordingOps` of the loaded model."""
        with ExitStack() as stack:
            stack.callback(self._module.register_forward_pre_hook(self._begin).remove)
            stack.callback(self._module.register_forward_hook(self._end).remove)
            for name, module in self._module.named_modules():
                if is_inside(name, self._bridged):
                    continue  # transformers' own code, one request after another: the block as a whole is compared
                for handle in self._hooks(name, module):
                    stack.callback(handle.remove)
            ops.listener = self.seam
            stack.callback(setattr, ops, "listener", None)
            yield

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        batch: ForwardBatch = args[0]
        self.segments = self._matcher.segments(batch)
        self._num_rows = batch.num_tokens
        self._left_out.clear()
        self.seam.begin(batch)

    def _end(self, *_: Any) -> None:
        self.segments = []

    def _hooks(self, name: str, module: nn.Module) -> Iterator[Any]:
        if name in self._boundaries:
            yield module.register_forward_pre_hook(self._graft(name))
        targets = self._fused.parts(name)
        if targets:
            yield module.register_forward_hook(self._fused_hook(name), with_kwargs=True)
        elif self._known(name) and not holds_layers(name, self.table.layers):
            yield module.register_forward_hook(self._output_hook(name), with_kwargs=True)

    def _known(self, name: str) -> bool:
        return any(name in capture.calls for capture in self.captures.values())

    def _graft(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
            if not self.segments or not args:
                return None
            hidden = value_of(args[0])
            replaced = hidden.clone()
            for segment, call in self._calls(name):
                self.compare(ProbeKey(name, INPUT), segment, (hidden,), call.inputs[:1])
                wanted = call.inputs[0][segment.index]
                if wanted.shape[1:] == hidden.shape[1:]:
                    replaced[segment.rows] = wanted.to(hidden)
            return (replaced, *args[1:])

        return hook

    def _output_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs, outputs = self._rows_of((args, kwargs)), self._rows_of([output])
            for segment, call in self._calls(name):
                key, capture = ProbeKey(name), self.captures[segment.prompt]
                self._compare_inputs(key, segment, inputs, call.inputs)
                if name in capture.computed and call.inputs and self.seam.mixes(name):
                    self.compare(ProbeKey(name, FED), segment, inputs[:1], call.inputs[:1])
                if name in capture.repeated:
                    wanted = tuple(tensor for other in capture.all_calls(name) for tensor in other.outputs)
                    self.compare_repeats(key, segment, outputs, wanted)
                elif call.outputs or not call.entries:
                    self.compare(key, segment, outputs, call.outputs)
                else:
                    self._compare_closing(name, segment, (inputs[:1], outputs), call)

        return hook

    def _fused_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs = self._rows_of((args, kwargs))
            for part, tensor in self._fused.split(name, self._rows_of([output])):
                for segment, call in self._calls(part):
                    self._compare_inputs(ProbeKey(part), segment, inputs, call.inputs)
                    self.compare(ProbeKey(part), segment, (tensor,), call.outputs)

        return hook

    def _rows_of(self, value: Any) -> Rows:
        return tuple(t for t in tensors_of(value) if t.ndim and t.shape[0] == self._num_rows)

    def _calls(self, name: str) -> Iterator[tuple[Segment, Call]]:
        for segment in self.segments:
            call = self.captures[segment.prompt].calls.get(name)
            if call is not None:
                yield segment, call

    def pair(self, places: Segment, ours: Rows, reference: Rows, match: Match = pair_tensors) -> Pairing:
        """Our tensors at `places.rows` matched with the reference's, kept by its captures, at `places.index`."""
        return match([t[places.rows] for t in ours], [t[places.index] for t in reference])

    def compare(self, key: ProbeKey, segment: Segment, ours: Rows, reference: Rows) -> None:
        """Compare our rows of the step [rows, …] with the reference's of the prompt [tokens, …]."""
        self._add(key, segment, self.pair(segment, ours, reference))

    def compare_repeats(self, key: ProbeKey, segment: Segment, ours: Rows, reference: Rows) -> None:
        """The same for what several calls of a module gave, in any order."""
        self._add(key, segment, self.pair(segment, ours, reference, pair_closest))

    def compare_choices(
        self, key: ProbeKey, part: Segment, choices: Choices, ties: Tensor, pick: Callable[[Capture], Tensor]
    ) -> None:
        """Compare selections of places; `ties` [rows] bool. `pick`: the reference's selection in another capture."""
        self.table.probe(key, part.prompt).add_choices(choices, part.index, choices.changed, ties)

    def _add(self, key: ProbeKey, segment: Segment, pairing: Pairing) -> None:
        ties = self.table.probe(key, segment.prompt).add(pairing, segment.index, self.keep(key.module, segment))
        self.leave_out(key.module, segment, ties)

    def _compare_closing(self, name: str, segment: Segment, ours: tuple[Rows, Rows], call: Call) -> None:
        """Entries of compressed tokens, which stand in the rows of the tokens that complete them."""
        capture = self.captures[segment.prompt]
        ratio = next((r for r in self._ratios if capture.num_tokens // r == len(call.entries[0])), None)
        if ratio is None:
            return
        if call.given and name in capture.computed:
            self.compare_entries(ProbeKey(name, FED), segment, ours[0], call.given, ratio)
        self.compare_entries(ProbeKey(name), segment, ours[1], call.entries, ratio, (ours[0], call.given))

    def compare_entries(
        self,
        key: ProbeKey,
        segment: Segment,
        ours: Rows,
        entries: Rows,
        ratio: int,
        inputs: tuple[Rows, Rows] = ((), ()),
    ) -> None:
        """Compare our rows of tokens that close an entry of `ratio` tokens with the reference's [entries, …].

        `inputs`: what both were made of, in rows like theirs.
        """
        closed = closed_entries(segment, ratio)
        if len(closed.index):
            keep, probe = torch.ones(len(closed.index), dtype=torch.bool), self.table.probe(key, segment.prompt)
            for one, other, add in ((*inputs, probe.add_inputs), (ours, entries, probe.add)):
                add(self.pair(closed, one, other), (closed.index + 1) * ratio - 1, keep)

    def _compare_inputs(self, key: ProbeKey, segment: Segment, ours: Rows, reference: Rows) -> None:
        pairing = self.pair(segment, ours, reference)
        probe = self.table.probe(key, segment.prompt)
        probe.add_inputs(pairing, segment.index, self.keep(key.module, segment))

    def keep(self, module: str, segment: Segment) -> Tensor:
        """[rows] bool: tokens of this layer whose experts and keys are the reference's."""
        out = self._left_out.get((segment.prompt, layer_of(module, self.table.layers)))
        return torch.ones(len(segment.index), dtype=torch.bool) if out is None else ~out[segment.index]

    def leave_out(self, module: str, segment: Segment, ties: Tensor) -> None:
        """From now on in this layer and step, leave out the rows `ties` [rows] bool: they chose among equals."""
        if not bool(ties.any()):
            return
        place = (segment.prompt, layer_of(module, self.table.layers))
        length = self.captures[segment.prompt].num_tokens
        self._left_out.setdefault(place, torch.zeros(length, dtype=torch.bool))[segment.index[ties]] = True
        first = int(segment.index[ties].min())
        self.tie_tokens[segment.prompt] = min(first, self.tie_tokens.get(segment.prompt, first))


def closed_entries(segment: Segment, ratio: int) -> Segment:
    """The rows of tokens that close an entry of `ratio` tokens, by the places of these entries."""
    closing = (segment.index + 1) % ratio == 0
    return Segment(segment.prompt, segment.rows[closing], segment.index[closing] // ratio)


def boundaries(capture: Capture, layers: Mapping[str, int]) -> set[str]:
    """Where the reference's tensors are put in: every layer, and the first module after the last layer."""
    order = [name for name in capture.order if name in capture.calls]
    last = max((place for place, name in enumerate(order) if name in layers), default=-1)
    after = [name for name in order[last + 1 :] if not holds_layers(name, layers)]
    return {*layers, *after[:1]}


def value_of(residual: Any) -> Tensor:
    """The residual stream as one tensor: a tensor, or an object whose `value()` is."""
    return residual if isinstance(residual, Tensor) else residual.value()


__all__ = ["OUTPUT", "ProbeRun", "boundaries", "value_of"]
