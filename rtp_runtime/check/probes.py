"""Our side of the probes: hooks on modules named as the reference's, and the op seam, compared while the engine runs.

Each decoder layer is given the reference's input, so that an error is seen where it arises. Positions, state and
indices stay the engine's. Nothing of ours is kept: every output is compared at once and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rtp_kernel.batch import ForwardBatch
from rtp_runtime.check.capture import AttentionCall, Call, Capture
from rtp_runtime.check.compare import tensors_of
from rtp_runtime.check.names import layer_of, parent_of
from rtp_runtime.check.pairs import pair_tensors
from rtp_runtime.check.probe_table import CORE, INPUT, K, ProbeKey, ProbeTable, Q, V
from rtp_runtime.check.rows import RowMatcher, Segment
from rtp_runtime.check.splits import FusedOutputs

Rows = tuple[Tensor, ...]


class ProbeRun:
    """Compares what our model computes in engine steps with captures of the reference, prompt by prompt."""

    def __init__(
        self,
        module: nn.Module,
        table: ProbeTable,
        captures: Mapping[str, Capture],
        matcher: RowMatcher,
        fused: FusedOutputs,
    ) -> None:
        self._module = module
        self._table = table
        self._captures = captures
        self._matcher = matcher
        self._fused = fused
        self._boundaries = boundaries(next(iter(captures.values())), table.layers)
        self._segments: list[Segment] | None = None
        self._num_rows = 0
        self._ties: dict[tuple[str, int | None], Tensor] = {}
        self.tie_tokens: dict[str, int] = {}
        """Prompt -> its first token for which experts changed by a tie."""

    @contextmanager
    def attached(self, ops: Any) -> Iterator[None]:
        """Probe every step that the engine runs inside the block. `ops`: the `RecordingOps` of the loaded model."""
        with ExitStack() as stack:
            stack.callback(self._module.register_forward_pre_hook(self._begin).remove)
            stack.callback(self._module.register_forward_hook(self._end).remove)
            for name, module in self._module.named_modules():
                for handle in self._hooks(name, module):
                    stack.callback(handle.remove)
            ops.listener = self
            stack.callback(setattr, ops, "listener", None)
            yield

    def keys_values(self, component: str, k: Tensor, v: Tensor) -> None:
        """The op seam: keys and values [tokens, kv heads, dim] that a component writes into its cache."""
        self._compare_attention(component, K, k, slice(0, len(k)), lambda call: call.k)
        self._compare_attention(component, V, v, slice(0, len(v)), lambda call: call.v)

    def attention(self, component: str, rows: slice, q: Tensor, output: Tensor) -> None:
        """The op seam: queries [rows, heads, dim] and what attention makes of them."""
        self._compare_attention(component, Q, q, rows, lambda call: call.q)
        self._compare_attention(component, CORE, output, rows, lambda call: call.output)

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        batch: ForwardBatch = args[0]
        self._segments = self._matcher.segments(batch)
        self._num_rows = batch.num_tokens
        self._ties.clear()

    def _end(self, *_: Any) -> None:
        self._segments = None

    def _hooks(self, name: str, module: nn.Module) -> Iterator[Any]:
        if name in self._boundaries:
            yield module.register_forward_pre_hook(self._graft(name))
        targets = self._fused.parts(name)
        if targets:
            yield module.register_forward_hook(self._fused_hook(name), with_kwargs=True)
        elif self._known(name) and not self._holds_layers(name):
            yield module.register_forward_hook(self._output_hook(name), with_kwargs=True)

    def _known(self, name: str) -> bool:
        return any(name in capture.calls for capture in self._captures.values())

    def _holds_layers(self, name: str) -> bool:
        return any(layer.startswith(f"{name}.") for layer in self._table.layers)

    def _graft(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
            if self._segments is None or not args:
                return None
            hidden = value_of(args[0])
            replaced = hidden.clone()
            for segment, call in self._calls(name):
                self._compare(ProbeKey(name, INPUT), segment, (hidden,), call.inputs[:1])
                wanted = call.inputs[0][segment.index]
                if wanted.shape[1:] == hidden.shape[1:]:
                    replaced[segment.rows] = wanted.to(hidden)
            return (replaced, *args[1:])

        return hook

    def _output_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs, outputs = self._rows_of((args, kwargs)), self._rows_of([output])
            for segment, call in self._calls(name):
                self._compare_inputs(ProbeKey(name), segment, inputs, call.inputs)
                self._compare(ProbeKey(name), segment, outputs, call.outputs)

        return hook

    def _fused_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs = self._rows_of((args, kwargs))
            for part, tensor in self._fused.split(name, self._rows_of([output])):
                for segment, call in self._calls(part):
                    self._compare_inputs(ProbeKey(part), segment, inputs, call.inputs)
                    self._compare(ProbeKey(part), segment, (tensor,), call.outputs)

        return hook

    def _rows_of(self, value: Any) -> Rows:
        return tuple(t for t in tensors_of(value) if t.ndim and t.shape[0] == self._num_rows)

    def _calls(self, name: str) -> Iterator[tuple[Segment, Call]]:
        for segment in self._segments or ():
            call = self._captures[segment.prompt].calls.get(name)
            if call is not None:
                yield segment, call

    def _compare(self, key: ProbeKey, segment: Segment, ours: Rows, reference: Rows) -> None:
        pairing = pair_tensors([t[segment.rows] for t in ours], [t[segment.index] for t in reference])
        ties = self._table.probe(key, segment.prompt).add(pairing, segment.index, self._keep(key, segment))
        if bool(ties.any()):
            place = (segment.prompt, layer_of(key.module, self._table.layers))
            self._ties[place] = ties
            first = int(segment.index[ties][0])
            self.tie_tokens[segment.prompt] = min(first, self.tie_tokens.get(segment.prompt, first))

    def _compare_inputs(self, key: ProbeKey, segment: Segment, ours: Rows, reference: Rows) -> None:
        pairing = pair_tensors([t[segment.rows] for t in ours], [t[segment.index] for t in reference])
        self._table.probe(key, segment.prompt).add_inputs(pairing, segment.index, self._keep(key, segment))

    def _keep(self, key: ProbeKey, segment: Segment) -> Tensor:
        """[rows] bool: tokens of this layer whose experts are the reference's."""
        ties = self._ties.get((segment.prompt, layer_of(key.module, self._table.layers)))
        return torch.ones(len(segment.rows), dtype=torch.bool) if ties is None else ~ties

    def _compare_attention(
        self, component: str, what: str, ours: Tensor, rows: slice, pick: Callable[[AttentionCall], Tensor]
    ) -> None:
        for segment in self._segments or ():
            found = self._attention_call(component, segment.prompt)
            if found is None:
                continue
            here = (segment.rows >= rows.start) & (segment.rows < rows.stop)
            part = Segment(segment.prompt, segment.rows[here] - rows.start, segment.index[here])
            self._compare(ProbeKey(found[0], what), part, (ours.flatten(1),), (pick(found[1]).flatten(1),))

    def _attention_call(self, component: str, prompt: str) -> tuple[str, AttentionCall] | None:
        """The reference's attention call by the module in which our component stands."""
        calls, name = self._captures[prompt].attention, component
        while name and name not in calls:
            name = parent_of(name)
        return (name, calls[name]) if name else None


def boundaries(capture: Capture, layers: Mapping[str, int]) -> set[str]:
    """Where the reference's tensors are put in: every layer, and the first module after the last layer."""
    order = [name for name in capture.order if name in capture.calls]
    last = max((place for place, name in enumerate(order) if name in layers), default=-1)
    after = [name for name in order[last + 1 :] if not any(layer.startswith(f"{name}.") for layer in layers)]
    return {*layers, *after[:1]}


def value_of(residual: Any) -> Tensor:
    """The residual stream as one tensor: a tensor, or an object whose `value()` is."""
    return residual if isinstance(residual, Tensor) else residual.value()
