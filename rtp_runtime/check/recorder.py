"""The op seam: a table of ops whose attention tells a listener what it was given and what it gave back.

Model files hold nothing for it, and without a listener an op is called as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from rtp_kernel.registry import OpFunction, OpTable

ATTENTION_OPS = ("write_kv", "paged_attention")


class AttentionListener(Protocol):
    """Whoever wants to know of attention. `rows` are the step's token rows that a call served."""

    def keys_values(self, component: str, k: Tensor, v: Tensor) -> None: ...

    def attention(self, component: str, rows: slice, q: Tensor, output: Tensor) -> None: ...


class RecordingOps(OpTable):
    """An `OpTable` that selects as any other and wraps what the attention ops return."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.listener: AttentionListener | None = None

    def select(
        self,
        component: str,
        op: str,
        *,
        regime: str = "any",
        shapes: Mapping[str, int] | None = None,
        options: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
    ) -> OpFunction:
        function = super().select(component, op, regime=regime, shapes=shapes, options=options, dtype=dtype)
        if op == "write_kv":
            return self._recording(function, functools.partial(self._tell_keys_values, component))
        if op == "paged_attention":
            return self._recording(function, functools.partial(self._tell_attention, component))
        return function

    def _recording(
        self, function: OpFunction, tell: Callable[[AttentionListener, tuple[Any, ...], Any], None]
    ) -> OpFunction:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if self.listener is not None:
                tell(self.listener, args, result)
            return result

        return call

    @staticmethod
    def _tell_keys_values(component: str, listener: AttentionListener, args: tuple[Any, ...], result: Any) -> None:
        listener.keys_values(component, args[0], args[1])

    @staticmethod
    def _tell_attention(component: str, listener: AttentionListener, args: tuple[Any, ...], result: Any) -> None:
        q, _, _, span = args[:4]
        listener.attention(component, slice(span.rows.start, span.rows.stop), q, result)
