"""What one forward of the reference computed, module by module and at its attention interface.

Reads any Hugging Face decoder: nothing here is a module's name. Tensors are kept by reference, so that a capture costs
little beyond the activations themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from rtp_runtime.check.compare import tensors_of
from rtp_runtime.check.functions import BeforeChange, intercepted_attention, intercepted_users
from rtp_runtime.check.names import layer_of

MAX_REPEATS = 8
"""Calls of one module that are kept, as of a rotary module with a table for each kind of layer."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module: the tensors that went in and came out, each [tokens, …]."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    entries: tuple[Tensor, ...] = ()
    """Outputs with one row for several tokens, as of a compressor: each [entries, …]."""
    given: tuple[Tensor, ...] = ()
    """The first input, if it has rows like these."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the attention interface: q after the rotary embedding, what came out, and how far a token sees."""

    q: Tensor
    """[tokens, heads, dim]"""
    k: Tensor
    v: Tensor
    output: Tensor
    """[tokens, heads * dim]"""
    window: int | None
    """The most keys that any token of this prompt saw; None where every token saw all before it."""
    visible: Tensor | None = None
    """[tokens, 1 or heads, keys] bool where a token sees a selection; keys past the tokens are compressed ones."""


@dataclass(slots=True)
class Capture:
    """One forward over one prompt. Names are the reference's dotted names, as ours."""

    num_tokens: int
    calls: dict[str, Call] = field(default_factory=dict)
    """In order of completion; the first call where a module is called more than once."""
    attention: dict[str, AttentionCall] = field(default_factory=dict)
    """By the module that called the attention interface."""
    order: list[str] = field(default_factory=list)
    """Names of `calls`, and `NAME:attention` where an attention interface was called."""
    repeated: set[str] = field(default_factory=set)
    """Modules called more than once."""
    repeats: dict[str, list[Call]] = field(default_factory=dict)
    """The later calls of these, as far as they are kept."""
    consumers: dict[str, int] = field(default_factory=dict)
    """Module outside the layers -> the first layer that took its output as a side input (a rotary table)."""
    computed: set[str] = field(default_factory=set)
    """Modules in layers whose input no module made: it was computed between modules, as attention's result is."""

    def all_calls(self, name: str) -> list[Call]:
        """Every call of a module that is kept."""
        return [self.calls[name], *self.repeats.get(name, ())] if name in self.calls else []


class ModuleRecorder:
    """Hooks that fill a `Capture`. `modules`: by their names; `layers`: name -> index of the decoder layers."""

    def __init__(self, modules: Mapping[str, nn.Module], layers: dict[str, int], num_tokens: int) -> None:
        self.capture = Capture(num_tokens)
        self._layers = layers
        # Activations and the like hold nothing of their own: what they make is seen in the modules around them.
        self._names = {module: name for name, module in modules.items() if holds_something(module)}
        self._producers: dict[int, str] = {}

    @contextmanager
    def attached(self) -> Iterator[Capture]:
        """Record every call made inside the block."""
        with ExitStack() as stack:
            for module, name in self._names.items():
                stack.callback(module.register_forward_hook(self._hook(name), with_kwargs=True).remove)
            stack.enter_context(intercepted_attention(list(self._names), self._record_attention))
            stack.enter_context(intercepted_users(self._names, self._record_user))
            stack.enter_context(BeforeChange(self._keep_values))
            yield self.capture

    def _keep_values(self, tensor: Tensor) -> None:
        """The reference is about to write into a tensor that is kept: what was seen must not change with it."""
        changed = _storage(tensor)
        if changed not in self._producers:
            return
        for name, call in self.capture.calls.items():
            self.capture.calls[name] = _copied(call, changed)
        for calls in self.capture.repeats.values():
            calls[:] = [_copied(call, changed) for call in calls]

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs, outputs = list(tensors_of((args, kwargs))), list(tensors_of([output]))
            if isinstance(module, nn.Conv1d):
                inputs, outputs = ([self._tokens_of(t, module) for t in side] for side in (inputs, outputs))
            self._record(name, inputs, outputs)

        return hook

    def _tokens_of(self, tensor: Tensor, module: nn.Conv1d) -> Tensor:
        """What a causal convolution is given or gives, [1, channels, places], without what pads it in front."""
        places, count = _channels_last(tensor), self.capture.num_tokens
        if tensor.ndim != 3:
            return places
        return places[:, :count] if any(module.padding) else places[:, -count:]

    def _record_user(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """A function that was given a convolution's weight stands for the module, if that is not called itself."""
        if name not in self.capture.calls:
            self._record(name, [_channels_last(t) for t in inputs], [_channels_last(t) for t in outputs])

    def _record(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        layer = layer_of(name, self._layers)
        if name in self._layers:
            self._note_consumers(self._layers[name], inputs)
        elif layer is not None and inputs and _storage(inputs[0]) not in self._producers:
            self.capture.computed.add(name)
        call = _as_call(inputs, outputs, self.capture.num_tokens)
        self._producers |= {_storage(tensor): name for tensor in outputs}
        if name not in self.capture.calls:
            self.capture.calls[name] = call
            self.capture.order.append(name)
            return
        self.capture.repeated.add(name)
        others = self.capture.repeats.setdefault(name, [])
        if len(others) < MAX_REPEATS:
            others.append(call)

    def _note_consumers(self, layer: int, inputs: list[Tensor]) -> None:
        for tensor in inputs[1:]:
            producer = self._producers.get(_storage(tensor))
            if producer is not None and layer_of(producer, self._layers) is None:
                self.capture.consumers.setdefault(producer, layer)

    def _record_attention(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, output: Tensor) -> None:
        name = self._names[module]
        if name in self.capture.attention:
            self.capture.repeated.add(f"{name}:attention")
            return
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
        rows = output.reshape(self.capture.num_tokens, -1)
        window, visible = seen_through(mask)
        self.capture.attention[name] = AttentionCall(q, k, v, rows, window, visible)
        self._producers[_storage(output)] = f"{name}:attention"
        self.capture.order.append(f"{name}:attention")


def _copied(call: Call, storage: int) -> Call:
    """The call with copies of those of its tensors that lie in this storage."""
    sides = {spec.name: getattr(call, spec.name) for spec in fields(call)}
    if not any(_storage(tensor) == storage for side in sides.values() for tensor in side):
        return call
    return Call(
        **{name: tuple(t.clone() if _storage(t) == storage else t for t in side) for name, side in sides.items()}
    )


def _as_call(inputs: list[Tensor], outputs: list[Tensor], num_tokens: int) -> Call:
    inputs, outputs = list(real_parts(inputs)), list(real_parts(outputs))
    rows = [[per_token(tensor, num_tokens) for tensor in side] for side in (inputs, outputs)]
    known = [tuple(tensor for tensor in side if tensor is not None) for side in rows]
    entries = tuple(
        found
        for tensor, row in zip(outputs, rows[1], strict=True)
        if row is None and (found := per_entry(tensor, num_tokens)) is not None
    )
    given = per_entry(inputs[0], num_tokens) if entries and inputs and rows[0][0] is None else None
    return Call(known[0], known[1], entries, () if given is None else (given,))


def _channels_last(tensor: Tensor) -> Tensor:
    """[1, channels, tokens], as convolutions want it, with the tokens first."""
    return tensor.transpose(1, 2) if tensor.ndim == 3 else tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def real_parts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors, complex ones (a table of rotations) as two: cosines and sines."""
    for tensor in tensors:
        yield from (tensor.real, tensor.imag) if tensor.is_complex() else (tensor,)


def holds_something(module: nn.Module) -> bool:
    """Whether the module has parameters or tables, its own or below."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def per_token(tensor: Tensor, num_tokens: int) -> Tensor | None:
    """`tensor` as [tokens, …], or None where it holds nothing per token."""
    if num_tokens == 1 and tensor.ndim == 4 and tensor.shape[0] == tensor.shape[2] == 1:
        return tensor[0].transpose(0, 1)
    if tensor.ndim and tensor.shape[0] == num_tokens and (tensor.ndim == 1 or tensor.shape[:2] != (1, 1)):
        return tensor
    if tensor.ndim > 1 and tensor.shape[:2] == (1, num_tokens):
        return tensor[0]
    # [1, heads, tokens, dim], as where heads are normed after they were turned; a mask [1, 1, tokens, keys] is not.
    if tensor.ndim == 4 and tensor.shape[0] == 1 and tensor.shape[2] == num_tokens != tensor.shape[3]:
        return tensor[0].transpose(0, 1)
    if tensor.ndim == 4 and tensor.shape[0] == 1 and tensor.shape[2] == num_tokens and tensor.dtype == torch.bool:
        return tensor[0].transpose(0, 1)  # which keys each token may see
    if tensor.ndim == 2 and tensor.is_floating_point() and tensor.shape[0] > num_tokens:
        heads, rest = divmod(tensor.shape[0], num_tokens)
        return None if rest else tensor.reshape(num_tokens, heads, -1)  # [tokens * heads, dim]
    return None


def per_entry(tensor: Tensor, num_tokens: int) -> Tensor | None:
    """[1, entries, dim] or [1, 1, entries, dim] with fewer rows than there are tokens, as [entries, dim]; else None."""
    while tensor.ndim > 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    fits = tensor.ndim == 2 and tensor.is_floating_point() and 0 < tensor.shape[0] <= num_tokens // 2
    return tensor if fits else None


def seen_through(mask: Any) -> tuple[int | None, Tensor | None]:
    """(window, selection) of an additive or boolean mask [1, 1 or heads, tokens, keys].

    The window is the most keys that a token sees if these are the last ones before it; None if it sees all of them. The
    selection is which it sees, [tokens, 1 or heads, keys] bool, where they are neither.
    """
    if not isinstance(mask, Tensor):
        return None, None
    allowed = mask[0] if mask.dtype == torch.bool else mask[0] > torch.finfo(mask.dtype).min / 2
    tokens = allowed.shape[1]
    recent = allowed[:, :, :tokens]
    most = int(recent[0].sum(dim=-1).max())
    distance = torch.arange(tokens)[:, None] - torch.arange(recent.shape[-1])
    band = (distance >= 0) & (distance < most)
    if torch.equal(recent, band.expand_as(recent)):
        window = most if most < tokens else None
        return window, allowed.transpose(0, 1) if allowed.shape[-1] > tokens else None
    return None, allowed.transpose(0, 1)
