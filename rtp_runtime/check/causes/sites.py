"""The single operations of the reference's own code: found while the accused module runs, and made wrong one by one.

An operation is a place in a modeling file, by file and column; a loop passes it many times, and all are made wrong.
"""

from __future__ import annotations

import ast
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Call = Callable[..., Any]
Replacement = Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]
"""(function, args, kwargs) -> what the operation gives instead."""
MAX_DEPTH = 24
MISSING = object()


@dataclass(slots=True)
class Site:
    """One operation: where it stands, what it is, and what it was given when it ran first."""

    code: CodeType
    place: int
    name: str
    """Of the torch function."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    order: int
    count: int = 1
    module: str = ""
    """The innermost module that was running."""
    span: tuple[int | None, ...] = field(default=())
    reflected: bool = False
    """Whether the operands stand the other way round in the text: `2 * x` reaches torch as x times 2."""

    @property
    def where(self) -> str:
        """The function of the modeling file."""
        return self.code.co_qualname if hasattr(self.code, "co_qualname") else self.code.co_name

    @property
    def text(self) -> str:
        """The expression as it is written, in one line."""
        start, end, left, right = self.span or (None,) * 4
        if start is None or end is None or left is None or right is None:
            return self.name
        lines = [linecache.getline(self.code.co_filename, number).encode() for number in range(start, end + 1)]
        if not lines:
            return self.name
        lines[-1] = lines[-1][:right]
        lines[0] = lines[0][left:]
        text = b" ".join(line.strip() for line in lines).decode()
        return " ".join(text.split())

    def operands(self) -> tuple[str, str]:
        """The two sides of a binary operation as they are written; empty where it is none."""
        try:
            node = ast.parse(textwrap.dedent(self.text), mode="exec").body[0]
        except (SyntaxError, IndexError):
            return "", ""
        value: Any = getattr(node, "value", node)
        if isinstance(node, ast.AugAssign):
            return ast.unparse(node.target), ast.unparse(node.value)
        if isinstance(value, ast.BinOp):
            sides = ast.unparse(value.left), ast.unparse(value.right)
            return sides[::-1] if self.reflected else sides
        return "", ""

    def note_reflection(self, frame: FrameType) -> None:
        """Find out which operand stands on the left, while the names in the text can be looked up."""
        if len(self.args) > 1 and not isinstance(self.args[1], Tensor):
            left = _looked_up(self.operands()[0], frame)
            self.reflected = left is not MISSING and not isinstance(left, Tensor)


def _looked_up(text: str, frame: FrameType) -> Any:
    """The value of a number, a name or an attribute of one; `MISSING` for any other text."""
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        return MISSING
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if isinstance(node, ast.Constant):
        return node.value
    if not isinstance(node, ast.Name):
        return MISSING
    value = frame.f_locals.get(node.id, frame.f_globals.get(node.id, MISSING))
    for name in reversed(names):
        value = vars(value).get(name, MISSING) if hasattr(value, "__dict__") else MISSING
    return value


Key = tuple[str, str, int, str]


def _key(code: CodeType, place: int, name: str) -> Key:
    return (code.co_filename, code.co_name, code.co_firstlineno * 100_000 + place, name)


class _Watch:
    """Whether the accused module is running, and which modules in it."""

    def __init__(self, root: nn.Module, names: Mapping[nn.Module, str], innocent: frozenset[str]) -> None:
        self._root, self._names, self._innocent = root, names, innocent
        self.stack: list[str] = []
        self.shut = 0

    @property
    def open(self) -> bool:
        return bool(self.stack) and not self.shut

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self._root.modules():
                name = self._names.get(module, "")
                stack.callback(module.register_forward_pre_hook(self._enter(name)).remove)
                stack.callback(module.register_forward_hook(self._leave(name), always_call=True).remove)
            yield

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.stack.append(name)
            self.shut += name in self._innocent

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if self.stack:
                self.stack.pop()
                self.shut -= name in self._innocent

        return hook


class _Mode(TorchFunctionMode):
    def __init__(self, watch: _Watch, hear: Callable[..., Any]) -> None:
        super().__init__()
        self._watch, self._hear = watch, hear

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not self._watch.open or name in _SILENT:
            return func(*args, **kwargs)
        frame = _caller(sys._getframe(1))
        if frame is None:
            return func(*args, **kwargs)
        return self._hear(func, name, args, kwargs, frame)


_SILENT = frozenset(
    {"__get__", "__set__", "size", "dim", "numel", "is_floating_point", "stride", "data_ptr", "__bool__", "item"}
)


def _caller(frame: FrameType | None) -> FrameType | None:
    """The frame of a modeling file from which torch was called."""
    for _ in range(MAX_DEPTH):
        if frame is None:
            return None
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        # Between the file and torch there may be others that listen, as what records a capture does.
        if package not in ("torch", "rtp_runtime"):
            return frame if package.startswith("transformers") else None
        frame = frame.f_back
    return None


class Sites:
    """The operations of one module. `innocent`: modules inside it whose own operations are left alone."""

    def __init__(self, root: nn.Module, names: Mapping[nn.Module, str], innocent: frozenset[str] = frozenset()) -> None:
        self._root, self._names, self._innocent = root, names, innocent

    @contextmanager
    def listening(self) -> Iterator[list[Site]]:
        """Collects the operations that run inside the block, in order."""
        found: dict[Key, Site] = {}
        sites: list[Site] = []
        watch = _Watch(self._root, self._names, self._innocent)

        def hear(func: Any, name: str, args: Any, kwargs: Any, frame: FrameType) -> Any:
            result = func(*args, **kwargs)
            key = _key(frame.f_code, frame.f_lasti, name)
            if key in found:
                found[key].count += 1
            else:
                span = _span(frame)
                site = Site(
                    frame.f_code, frame.f_lasti, name, args, kwargs, result, len(sites), 1, watch.stack[-1], span
                )
                site.note_reflection(frame)
                found[key] = site
                sites.append(site)
            return result

        with watch.attached(), _Mode(watch, hear):
            yield sites

    @contextmanager
    def wrong(self, site: Site, replace: Replacement) -> Iterator[None]:
        """The operation replaced."""
        watch = _Watch(self._root, self._names, self._innocent)
        wanted = _key(site.code, site.place, site.name)

        def hear(func: Any, name: str, args: Any, kwargs: Any, frame: FrameType) -> Any:
            if name == site.name and _key(frame.f_code, frame.f_lasti, name) == wanted:
                return replace(func, args, kwargs)
            return func(*args, **kwargs)

        with watch.attached(), _Mode(watch, hear):
            yield


def _span(frame: FrameType) -> tuple[int | None, ...]:
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None:
        return ()
    for number, position in enumerate(positions()):
        if 2 * number == frame.f_lasti:
            return tuple(position)
    return ()


def is_value(value: Any) -> bool:
    """Whether it is a tensor of real numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def narrowed(value: Any) -> Any:
    """A tensor of real numbers rounded to bfloat16; anything else as it is."""
    return value.to(torch.bfloat16).to(value.dtype) if is_value(value) else value
