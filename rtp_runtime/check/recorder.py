"""The op seam: a table of ops that tells a listener what some of them were given and what they gave back.

Model files hold nothing for it, and without a listener an op is called as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from rtp_kernel.registry import OpFunction, OpTable

HEARD = frozenset(
    {
        "write_kv",
        "write_state",
        "paged_attention",
        "latent_attention",
        "compressed_attention",
        "select",
        "causal_conv",
        "gated_delta_rule",
        "lightning_attention",
    }
)
"""Ops that are told of, and every op whose name ends in `SCORES`."""
SCORES = "_scores"


class Listener(Protocol):
    """Whoever wants to know of ops, by the component that called."""

    def heard(self, component: str, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None: ...


class RecordingOps(OpTable):
    """An `OpTable` that selects as any other and wraps what some ops return."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.listener: Listener | None = None

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
        return self._recording(component, op, function) if op in HEARD or op.endswith(SCORES) else function

    def _recording(self, component: str, op: str, function: OpFunction) -> OpFunction:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if self.listener is not None:
                self.listener.heard(component, op, args, kwargs, result)
            return result

        return call
