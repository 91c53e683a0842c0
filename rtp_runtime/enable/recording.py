"""Runs the small reference once and keeps what went into and came out of every module, every attention call, and of the
products and softmaxes that stand between modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

NUM_TOKENS = 40
"""Five windows of a shrunken config, so that a window shows in the mask."""
FUNCTIONS = ("softmax", "matmul", "__matmul__", "bmm", "baddbmm", "scaled_dot_product_attention")
"""What attention is made of where a modeling file writes it out."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of one module: `inputs` are its tensor arguments (positional, then keyword), `outputs` its tensors."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """One call of a function of `FUNCTIONS` inside the forward of the module `module`."""

    module: str
    function: str
    inputs: tuple[Tensor, ...]
    output: Tensor


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What a module handed to the attention function: query, key, value [1, heads, tokens, dim], mask and keywords."""

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]
    output: Tensor
    """[1, tokens, heads, dim]"""


@dataclass(frozen=True, eq=False)
class Recording:
    """One run of the reference over one prompt."""

    ids: Tensor
    calls: tuple[Call, ...]
    """In the order in which they began."""
    attention: dict[str, AttentionCall]
    """By the name of the module that called, or that wrote attention out: `rtp_runtime.enable.written_out`."""
    logits: Tensor
    functions: tuple[FunctionCall, ...] = ()
    """In the order in which they ended."""

    def of(self, name: str) -> Call:
        """The call of the module `name`; KeyError when it did not run exactly once."""
        found = self.calls_of(name)
        if len(found) != 1:
            raise KeyError(f"{name} ran {len(found)} times")
        return found[0]

    def calls_of(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    def inside(self, name: str) -> list[Call]:
        """Calls of all modules inside the module `name`, in order."""
        return [call for call in self.calls if call.name.startswith(f"{name}.")]

    def children(self, name: str) -> list[Call]:
        """Calls of the direct children of the module `name`, in order."""
        prefix = f"{name}." if name else ""
        return [
            c for c in self.calls if c.name.startswith(prefix) and c.name != name and "." not in c.name[len(prefix) :]
        ]


@torch.no_grad()
def record(model: nn.Module, vocabulary: int, seed: int = 0) -> Recording:
    """Run `model` on random ids, eager attention, batch 1."""
    ids = torch.randint(3, vocabulary, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(seed))
    calls: list[Call] = []
    attention: dict[str, AttentionCall] = {}
    functions = _Functions()
    with _hooks(model, calls, functions), _attention_recorder(model, attention), functions:
        logits = model(input_ids=ids, use_cache=False).logits.clone()
    from rtp_runtime.enable.written_out import written_out

    attention |= {call.name: call for call in written_out(functions.calls, list(attention))}
    return Recording(ids, tuple(calls), attention, logits, tuple(functions.calls))


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested arguments, in order, copied."""
    if isinstance(value, Tensor):
        yield value.detach().clone()
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)


class _Functions(TorchFunctionMode):
    """Keeps the calls of `FUNCTIONS`, each with the innermost module whose forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[FunctionCall] = []
        self.modules: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name in FUNCTIONS and isinstance(output, Tensor) and self.modules:
            inputs = tuple(tensors((args, kwargs or {})))
            self.calls.append(FunctionCall(self.modules[-1], name, inputs, output.detach().clone()))
        return output


@contextmanager
def _hooks(model: nn.Module, calls: list[Call], functions: _Functions) -> Iterator[None]:
    handles = []
    open_calls: list[tuple[int, tuple[Tensor, ...]]] = []

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            open_calls.append((len(calls), tuple(tensors((args, kwargs)))))
            calls.append(Call("", module, (), ()))
            functions.modules.append(name)

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            place, inputs = open_calls.pop()
            functions.modules.pop()
            calls[place] = Call(name, module, inputs, tuple(tensors(output)))

        return hook

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after(name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _attention_recorder(model: nn.Module, found: dict[str, AttentionCall]) -> Iterator[None]:
    """Listen where the modeling file looks up its own eager attention function."""
    modeling = sys.modules[type(model).__module__]
    original = getattr(modeling, "eager_attention_forward", None)
    if original is None:
        yield
        return
    names = {id(module): name for name, module in model.named_modules()}

    def listener(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        mask = attention_mask
        q, k, v = (part.detach().clone() for part in (query, key, value))
        result = original(module, query, key, value, mask, *args, **kwargs)
        kept = {name: option for name, option in kwargs.items() if option is not None}
        seen = mask.detach().clone() if isinstance(mask, Tensor) else None
        name = names[id(module)]
        found[name] = AttentionCall(name, q, k, v, seen, kept, result[0].detach().clone())
        return result

    modeling.eager_attention_forward = listener  # type: ignore[attr-defined]
    try:
        yield
    finally:
        modeling.eager_attention_forward = original  # type: ignore[attr-defined]
