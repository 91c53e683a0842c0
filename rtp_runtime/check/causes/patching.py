"""Putting something wrong into live modules for the time of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

MISSING = object()


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value of an attribute."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def tensor(owner: nn.Module, name: str, value: Tensor) -> Iterator[None]:
    """Another tensor in the place of a parameter or buffer."""
    is_parameter = name in owner._parameters
    held: dict[str, Any] = owner._parameters if is_parameter else owner._buffers
    before = held[name]
    held[name] = nn.Parameter(value, requires_grad=False) if is_parameter else value
    try:
        yield
    finally:
        held[name] = before


@contextmanager
def forward(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Another forward of one module."""
    before = module.__dict__.get("forward", MISSING)
    module.forward = function
    try:
        yield
    finally:
        if before is MISSING:
            module.__dict__.pop("forward", None)
        else:
            module.forward = before


@contextmanager
def output(module: nn.Module, change: Callable[[Any, tuple[Any, ...]], Any]) -> Iterator[None]:
    """What the module gives changed: `change(output, args)`."""
    handle = module.register_forward_hook(lambda _, args, given: change(given, args))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def given(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The first tensor that the module is given changed."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(key for key, value in kwargs.items() if isinstance(value, Tensor))
        return args, {**kwargs, name: change(kwargs[name])}

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def function(
    scope: dict[str, Any], name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """A function of a modeling file wrapped."""
    before = scope[name]
    scope[name] = wrap(before)
    try:
        yield
    finally:
        scope[name] = before


def first_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A module's output with its first tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        place = next(i for i, item in enumerate(value) if isinstance(item, Tensor))
        return (*value[:place], change(value[place]), *value[place + 1 :])
    raise TypeError(f"a {type(value).__name__} holds no tensor")
