"""A linear recurrence per channel with a state per request."""

from __future__ import annotations

from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components.base import Binding, Component
from rtp_kernel.ops.linear_recurrence import linear_recurrence
from rtp_kernel.registry import OpFunction


class LinearRecurrence(Component):
    """x, decay [T, channels] -> [T, channels], the state after each token: decay times the one before, plus x.

    `state` is a view of [slots, channels]: `SlotState(axes={"channels": channels}, dtype="float32")`.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self._op: OpFunction = linear_recurrence

    def bind(self, binding: Binding) -> None:
        self._op = binding.op("linear_recurrence", shapes={"channels": self.channels})

    def forward(self, x: Tensor, decay: Tensor, batch: ForwardBatch, state: StateView) -> Tensor:
        out: Tensor = self._op(x, decay, state, batch)
        return out

    def extra_repr(self) -> str:
        return str(self.channels)
