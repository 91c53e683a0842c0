"""What one forward of the reference computed, module by module and at its attention interface.

Reads any Hugging Face decoder: nothing here is a module's name. Tensors are kept by reference, so that a capture costs
little beyond the activations themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rtp_runtime.check.compare import tensors_of

EAGER_ATTENTION = "eager_attention_forward"
"""The function of every modeling file through which its attention modules go when attention is eager."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module: the tensors that went in and came out, each [tokens, …]."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


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


@dataclass(slots=True)
class Capture:
    """One forward over one prompt. Names are the reference's dotted names."""

    num_tokens: int
    calls: dict[str, Call] = field(default_factory=dict)
    """In order of completion; the first call where a module is called more than once."""
    attention: dict[str, AttentionCall] = field(default_factory=dict)
    """By the module that called the attention interface."""
    order: list[str] = field(default_factory=list)
    """Names of `calls`, and `NAME:attention` where an attention interface was called."""
    repeated: set[str] = field(default_factory=set)
    """Modules called more than once."""
    consumers: dict[str, int] = field(default_factory=dict)
    """Module outside the layers -> the first layer that took its output as a side input (a rotary table)."""


class ModuleRecorder:
    """Hooks that fill a `Capture`. `layers`: name -> index of the decoder layers."""

    def __init__(self, model: nn.Module, layers: dict[str, int], num_tokens: int) -> None:
        self.capture = Capture(num_tokens)
        self._layers = layers
        # Activations and the like hold nothing of their own: what they make is seen in the modules around them.
        self._names = {module: name for name, module in model.named_modules() if name and holds_something(module)}
        self._producers: dict[int, str] = {}

    @contextmanager
    def attached(self) -> Iterator[Capture]:
        """Record every call made inside the block."""
        with ExitStack() as stack:
            for module, name in self._names.items():
                stack.callback(module.register_forward_hook(self._hook(name), with_kwargs=True).remove)
            stack.enter_context(intercepted_attention(list(self._names), self._record_attention))
            yield self.capture

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._record(name, list(tensors_of((args, kwargs))), list(tensors_of([output])))

        return hook

    def _record(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        if name in self._layers:
            self._note_consumers(self._layers[name], inputs)
        if name in self.capture.calls:
            self.capture.repeated.add(name)
            return
        num_tokens = self.capture.num_tokens
        rows = [[per_token(t, num_tokens) for t in side] for side in (inputs, outputs)]
        known = [tuple(t for t in side if t is not None) for side in rows]
        self.capture.calls[name] = Call(known[0], known[1])
        self.capture.order.append(name)
        if not any(name.startswith(f"{layer}.") for layer in self._layers):
            self._producers |= {tensor.data_ptr(): name for tensor in outputs}

    def _note_consumers(self, layer: int, inputs: list[Tensor]) -> None:
        for tensor in inputs[1:]:
            producer = self._producers.get(tensor.data_ptr())
            if producer is not None:
                self.capture.consumers.setdefault(producer, layer)

    def _record_attention(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, output: Tensor) -> None:
        name = self._names[module]
        if name in self.capture.attention:
            self.capture.repeated.add(f"{name}:attention")
            return
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
        rows = output.reshape(self.capture.num_tokens, -1)
        self.capture.attention[name] = AttentionCall(q, k, v, rows, visible_window(mask))
        self.capture.order.append(f"{name}:attention")


def holds_something(module: nn.Module) -> bool:
    """Whether the module has parameters or tables, its own or below."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def per_token(tensor: Tensor, num_tokens: int) -> Tensor | None:
    """`tensor` as [tokens, …], or None where it holds nothing per token."""
    if tensor.ndim and tensor.shape[0] == num_tokens and (tensor.ndim == 1 or tensor.shape[:2] != (1, 1)):
        return tensor
    if tensor.ndim > 1 and tensor.shape[:2] == (1, num_tokens):
        return tensor[0]
    # [1, heads, tokens, dim], as where heads are normed after they were turned; a mask [1, 1, tokens, keys] is not.
    if tensor.ndim == 4 and tensor.shape[0] == 1 and tensor.shape[2] == num_tokens != tensor.shape[3]:
        return tensor[0].transpose(0, 1)
    return None


def visible_window(mask: Any) -> int | None:
    """The most keys that a token sees under an additive or boolean mask [1, 1, tokens, keys]; None if it is causal."""
    if not isinstance(mask, Tensor):
        return None
    allowed = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] > torch.finfo(mask.dtype).min / 2
    most = int(allowed.sum(dim=-1).max())
    return most if most < mask.shape[-1] else None


@contextmanager
def intercepted_attention(modules: list[nn.Module], record: Callable[..., None]) -> Iterator[None]:
    """Tell `record(module, q, k, v, mask, output)` of every eager attention call of these modules."""
    scopes = {id(scope): scope for scope in map(_attention_scope, modules) if scope is not None}
    originals = {key: scope[EAGER_ATTENTION] for key, scope in scopes.items()}

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(module, q, k, v, mask, *args, **kwargs)
            record(module, q, k, v, mask, result[0])
            return result

        return attend

    try:
        for key, scope in scopes.items():
            scope[EAGER_ATTENTION] = wrap(originals[key])
        yield
    finally:
        for key, scope in scopes.items():
            scope[EAGER_ATTENTION] = originals[key]


def _attention_scope(module: nn.Module) -> dict[str, Any] | None:
    """The globals from which this module's forward takes its eager attention function."""
    scope: dict[str, Any] = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
    return scope if EAGER_ATTENTION in scope and EAGER_ATTENTION in _names_used(type(module)) else None


def _names_used(module_class: type[nn.Module]) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(module_class.forward), "__code__", None)
    return code.co_names if code is not None else ()
