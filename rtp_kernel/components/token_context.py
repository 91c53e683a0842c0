"""What a model is told of the tokens before each token, beyond what its hidden states hold."""

from __future__ import annotations

from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components.base import Binding, Component
from rtp_kernel.ops.token_context import previous_tokens
from rtp_kernel.registry import OpFunction


class PreviousTokens(Component):
    """The ids of the `count` tokens before each token of the step, the nearest first: [T, count] int64.

    `state` is a view of [slots, count]: `SlotState(axes={"tokens": count}, dtype="int64", initial=...)`, whose initial
    value stands for the tokens before a request's first.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self._op: OpFunction = previous_tokens

    def bind(self, binding: Binding) -> None:
        self._op = binding.op("previous_tokens", shapes={"count": self.count})

    def forward(self, batch: ForwardBatch, state: StateView) -> Tensor:
        previous: Tensor = self._op(state, batch)
        return previous

    def extra_repr(self) -> str:
        return str(self.count)
