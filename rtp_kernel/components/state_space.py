"""The state spaces of Mamba and Mamba 2, each with a state per request."""

from __future__ import annotations

from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components.base import Binding, Component
from rtp_kernel.ops.selective_scan import selective_scan
from rtp_kernel.ops.state_space_scan import state_space_scan
from rtp_kernel.registry import OpFunction


class SelectiveScan(Component):
    """Mamba's recurrence per channel; see `rtp_kernel.ops.selective_scan` for the rule.

    x, dt, gate [T, channels], B, C [T, state size] -> [T, channels]; a gate of None gates nothing. A_log [channels,
    state size], D and dt_bias [channels] are arguments, as the reference holds them in the layer itself; a dt_bias of
    None is for a dt that has it. `state` is a view of [slots, channels, state size]:
    `SlotState(axes={"channels": ..., "state": ...}, dtype="float32")`.
    """

    def __init__(self, channels: int, state_size: int) -> None:
        super().__init__()
        self._shapes = {"channels": channels, "state": state_size}
        self._op: OpFunction = selective_scan

    def bind(self, binding: Binding) -> None:
        self._op = binding.op("selective_scan", shapes=self._shapes)

    def forward(
        self,
        x: Tensor,
        dt: Tensor,
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        gate: Tensor | None,
        A_log: Tensor,  # noqa: N803
        D: Tensor,  # noqa: N803
        dt_bias: Tensor | None,
        batch: ForwardBatch,
        state: StateView,
    ) -> Tensor:
        out: Tensor = self._op(x, dt, B, C, gate, A_log, D, dt_bias, state, batch)
        return out

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self._shapes.items())


class StateSpaceScan(Component):
    """Mamba 2's recurrence per head; see `rtp_kernel.ops.state_space_scan` for the rule.

    x [T, heads * dim], dt [T, heads], B, C [T, groups * state size] -> [T, heads * dim]. A_log, D and dt_bias [heads]
    are arguments, as the reference holds them in the layer itself. The step is clamped to `limits`. `state` is a view
    of [slots, heads, dim, state size]:
    `SlotState(axes={"heads": ..., "dim": ..., "state": ...}, dtype="float32")`.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        state_size: int,
        groups: int = 1,
        *,
        limits: tuple[float, float] = (0.0, float("inf")),
    ) -> None:
        super().__init__()
        if num_heads % groups:
            raise ValueError(f"{num_heads} heads cannot share {groups} groups of B and C: no multiple")
        self._shapes = {"heads": num_heads, "head dim": head_dim, "state": state_size, "groups": groups}
        self.limits = (float(limits[0]), float(limits[1]))
        self._op: OpFunction = state_space_scan

    def bind(self, binding: Binding) -> None:
        self._op = binding.op("state_space_scan", shapes=self._shapes, options={"limits": self.limits})

    def forward(
        self,
        x: Tensor,
        dt: Tensor,
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        A_log: Tensor,  # noqa: N803
        D: Tensor,  # noqa: N803
        dt_bias: Tensor,
        batch: ForwardBatch,
        state: StateView,
    ) -> Tensor:
        heads, groups = self._shapes["heads"], self._shapes["groups"]
        x, B, C = x.unflatten(-1, (heads, -1)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))  # type: ignore[no-untyped-call]  # noqa: N806
        out: Tensor = self._op(x, dt, B, C, A_log, D, dt_bias, state, batch, limits=self.limits)
        return out.flatten(1)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self._shapes.items()) + f", limits={self.limits}"
