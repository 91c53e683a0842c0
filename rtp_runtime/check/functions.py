"""The reference's functions that stand between its modules: eager attention, and those that use a module's weight.

A modeling file calls them by name from its globals, where they are wrapped for the time of a capture.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rtp_runtime.check.compare import tensors_of

EAGER_ATTENTION = "eager_attention_forward"
"""The function of every modeling file through which its attention modules go when attention is eager."""


class BeforeChange(TorchFunctionMode):
    """Tell `record(tensor)` of every tensor that is about to be written into."""

    def __init__(self, record: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        writes = name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if writes and args and isinstance(args[0], Tensor):
            self._record(args[0])
        return function(*args, **(kwargs or {}))


@contextmanager
def intercepted_attention(modules: list[nn.Module], record: Callable[..., None]) -> Iterator[None]:
    """Tell `record(module, q, k, v, mask, output)` of every eager attention call of these modules."""
    known = set(modules)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def attend(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            # By position, since files give keywords of their own choice: module, query, key, value, mask.
            module, q, k, v, mask, *_ = signature.bind(*args, **kwargs).arguments.values()
            if module in known:
                record(module, q, k, v, mask, result[0])
            return result

        return attend

    scopes = {id(scope): scope for scope in map(scope_of, modules) if EAGER_ATTENTION in scope}
    with _replaced([(scope, EAGER_ATTENTION, wrap) for scope in scopes.values()]):
        yield


@contextmanager
def intercepted_users(names: Mapping[nn.Module, str], record: Callable[..., None]) -> Iterator[None]:
    """Tell `record(module's name, inputs, outputs)` of functions that are given the weight of a module without a call.

    A convolution whose weight goes to a function of the modeling file is a module that is never called.
    """
    weights = {
        parameter.untyped_storage().data_ptr(): name
        for module, name in names.items()
        if isinstance(module, nn.Conv1d)
        for parameter in module.parameters(recurse=False)
    }

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            tensors = list(tensors_of((args, kwargs)))
            name = next((weights[key] for t in tensors if (key := t.untyped_storage().data_ptr()) in weights), None)
            if name is not None:
                record(name, tensors[:1], list(tensors_of([result])))
            return result

        return call

    parents = [module for module in names if any(isinstance(child, nn.Conv1d) for child in module.children())]
    places = {
        (id(scope), name): (scope, name, wrap)
        for module in parents
        for scope in (scope_of(module),)
        for name in _names_used(type(module))
        if callable(scope.get(name)) and not inspect.isclass(scope[name])
    }
    with _replaced(list(places.values())):
        yield


@contextmanager
def _replaced(places: list[tuple[dict[str, Any], str, Callable[[Any], Any]]]) -> Iterator[None]:
    originals = [(scope, name, scope[name]) for scope, name, _ in places]
    try:
        for scope, name, wrap in places:
            scope[name] = wrap(scope[name])
        yield
    finally:
        for scope, name, original in originals:
            scope[name] = original


def scope_of(module: nn.Module) -> dict[str, Any]:
    """The globals from which this module's forward takes the functions that it calls."""
    scope: dict[str, Any] = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
    return scope


def _names_used(module_class: type[nn.Module]) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(module_class.forward), "__code__", None)
    return code.co_names if code is not None else ()
