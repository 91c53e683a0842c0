"""What an operation gives instead, when it is made wrong: the replacements that `sites.Sites.wrong` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rtp_kernel.ops.activation import ACTIVATIONS
from rtp_runtime.check.causes.sites import Call, Replacement, narrowed

FUNCTION_OF: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS, "tanh": torch.tanh, "softplus": functional.softplus, "exp": torch.exp,
}  # fmt: skip


def keep_only(place: int) -> Replacement:
    def replace(function: Call, args: Any, kwargs: Any) -> Any:
        wanted = function(*(a.clone() if isinstance(a, Tensor) else a for a in args), **kwargs)
        return args[place].to(wanted.dtype).expand_as(wanted)

    return replace


def twice(function: Call, args: Any, kwargs: Any) -> Any:
    return function(function(*args, **kwargs), *args[1:], **kwargs)


def first_twice(function: Call, args: Any, kwargs: Any) -> Any:
    return function(args[0], function(*args, **kwargs), **kwargs)


def other_sign(function: Call, args: Any, kwargs: Any) -> Any:
    return function(args[0], -args[1], *args[2:], **kwargs)


def apply(name: str) -> Replacement:
    return lambda function, args, kwargs: FUNCTION_OF[name](args[0])


def sigmoid(function: Call, args: Any, kwargs: Any) -> Any:
    return args[0].sigmoid()


def softmax(function: Call, args: Any, kwargs: Any) -> Any:
    return args[0].softmax(-1)


def argument(place: int | str, value: Any) -> Replacement:
    def replace(function: Call, args: Any, kwargs: Any) -> Any:
        if isinstance(place, str):
            return function(*args, **{**kwargs, place: value})
        return function(*args[:place], value, *args[place + 1 :], **kwargs)

    return replace


def reduce(name: str) -> Replacement:
    def replace(function: Call, args: Any, kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        keep = bool(kwargs.get("keepdim", args[2] if len(args) > 2 else False))
        if dim is None:
            raise ValueError("over everything")
        return getattr(args[0], name)(dim=dim, keepdim=keep)

    return replace


def diagonal(by: int) -> Replacement:
    def replace(function: Call, args: Any, kwargs: Any) -> Any:
        now = kwargs.get("diagonal", args[1] if len(args) > 1 else 0)
        return function(args[0], diagonal=now + by)

    return replace


def flipped(function: Call, args: Any, kwargs: Any) -> Any:
    return function(args[0], args[1].flip(-1), *args[2:], **kwargs)


def exchange(one: int, other: int) -> Replacement:
    def replace(function: Call, args: Any, kwargs: Any) -> Any:
        parts = list(function(*args, **kwargs))
        parts[one], parts[other] = parts[other], parts[one]
        return tuple(parts)

    return replace


def by_turns(count: int) -> Replacement:
    def replace(function: Call, args: Any, kwargs: Any) -> Any:
        wanted = function(*args, **kwargs)
        dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
        size = args[0].shape[dim]
        places = torch.arange(size).view(-1, count).T
        return tuple(args[0].index_select(dim, rows).reshape(t.shape) for rows, t in zip(places, wanted, strict=True))

    return replace


def joined_backwards(function: Call, args: Any, kwargs: Any) -> Any:
    return function(list(args[0])[::-1], *args[1:], **kwargs)


def tiled(function: Call, args: Any, kwargs: Any) -> Any:
    times = args[1] if len(args) > 1 else kwargs["repeats"]
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    return torch.cat([args[0]] * int(times), dim=dim)


def transposed_second(function: Call, args: Any, kwargs: Any) -> Any:
    return function(args[0], args[1].transpose(-1, -2), *args[2:], **kwargs)


def transposed_first(function: Call, args: Any, kwargs: Any) -> Any:
    return function(args[0].transpose(-1, -2), *args[1:], **kwargs)


def split_other(function: Call, args: Any, kwargs: Any) -> Any:
    wanted = function(*args, **kwargs)
    heads, dim = wanted.shape[-2:]
    return args[0].reshape(*args[0].shape[:-1], dim, heads).transpose(-1, -2).reshape(wanted.shape)


def join_other(function: Call, args: Any, kwargs: Any) -> Any:
    wanted = function(*args, **kwargs)
    return args[0].transpose(-1, -2).reshape(wanted.shape)


def narrow_inputs(function: Call, args: Any, kwargs: Any) -> Any:
    return function(*map(narrowed, args), **kwargs)


def narrow_all(function: Call, args: Any, kwargs: Any) -> Any:
    return narrowed(function(*map(narrowed, args), **kwargs))
