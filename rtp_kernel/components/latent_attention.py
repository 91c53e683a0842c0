"""Latent attention: one low-rank vector per token in the cache, from which every head's key and value follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components.attention import REGIMES
from rtp_kernel.components.base import Binding, Component, parameter
from rtp_kernel.ops.attention import Span, spans
from rtp_kernel.ops.latent_attention import latent_attention
from rtp_kernel.ops.linear import linear
from rtp_kernel.ops.state import write_state
from rtp_kernel.registry import OpFunction, StepPlans, implementation_of

ABSORBED = ("decode", "verify")
"""Regimes of few queries over many latents: cheaper with the up-projection moved to the query and the result."""


class LatentUp(Component):
    """The up-projection of latents, `kv_b_proj`: `weight` [heads * (Dn + Dv), R], per head its key's rows, its value's.

    Called as a module it expands latents [..., R] -> [..., heads * (Dn + Dv)]. Attention takes `up` instead.
    """

    def __init__(self, latent_dim: int, num_heads: int, nope_dim: int, value_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.latent_dim = latent_dim
        self.nope_dim = nope_dim
        self.value_dim = value_dim
        self.weight = parameter(num_heads * (nope_dim + value_dim), latent_dim)
        self._linear: OpFunction = linear
        self._up: Tensor | None = None

    def bind(self, binding: Binding) -> None:
        self._linear = binding.op("linear", shapes={"in": self.latent_dim, "out": self.weight.shape[0]})

    def prepare(self) -> None:
        """Absorbed, a head's query meets `up[:, :Dn]` and its result `up[:, Dn:]`: views of the weight, no copies."""
        self._up = self._by_head()

    def unprepare(self) -> None:
        self._up = None

    def _by_head(self) -> Tensor:
        return self.weight.view(self.num_heads, self.nope_dim + self.value_dim, self.latent_dim)

    @property
    def up(self) -> Tensor:
        """The weight by heads: [heads, Dn + Dv, R]."""
        return self._by_head() if self._up is None else self._up

    def forward(self, latents: Tensor) -> Tensor:
        expanded: Tensor = self._linear(latents, self.weight, None)
        return expanded

    def extra_repr(self) -> str:
        return f"latent={self.latent_dim}, heads={self.num_heads}, nope={self.nope_dim}, value={self.value_dim}"


class LatentAttention(Component):
    """Writes the step's latents and rotated keys into the cache, then attends.

    q_nope [T, heads, Dn], q_rope [T, heads, Dr] or None, latent [T, R] (normalised), k_rope [T, Dr] (rotated) or None,
    and the `LatentUp` -> [T, heads * Dv]. The state is one entry of R + Dr per token. `selection` [T, 1, k] restricts
    each token to these token indices (-1 = none).
    """

    def __init__(
        self, num_heads: int, latent_dim: int, nope_dim: int, rope_dim: int, value_dim: int, *, scale: float
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.latent_dim = latent_dim
        self.nope_dim = nope_dim
        self.rope_dim = rope_dim
        self.value_dim = value_dim
        self.scale = scale
        self._write: OpFunction = write_state
        self._attend: dict[str, OpFunction] = dict.fromkeys(REGIMES, latent_attention)
        self._kind: tuple[Any, ...] = ("latent",)
        self._plans = StepPlans()

    def bind(self, binding: Binding) -> None:
        shapes = {
            "heads": self.num_heads,
            "latent": self.latent_dim,
            "nope": self.nope_dim,
            "rope": self.rope_dim,
            "value": self.value_dim,
        }
        self._write = binding.op("write_state", shapes={"width": self.latent_dim + self.rope_dim})
        self._attend = {regime: binding.op("latent_attention", regime=regime, shapes=shapes) for regime in REGIMES}
        self._kind = ("latent", *(implementation_of(op).name for op in self._attend.values()))
        self._plans = binding.ops.plans

    def _plan(self, batch: ForwardBatch, view: StateView) -> tuple[tuple[str, Span, Any], ...]:
        """What the chosen implementations want to know of each span of the step."""

        def ask(op: OpFunction, span: Span) -> Any:
            make = getattr(implementation_of(op), "plan", None)
            return None if make is None else make(batch, view, span, None)

        return tuple((regime, span, ask(self._attend[regime], span)) for regime, span in spans(batch))

    def forward(
        self,
        q_nope: Tensor,
        q_rope: Tensor | None,
        latent: Tensor,
        k_rope: Tensor | None,
        kv_b_proj: LatentUp,
        batch: ForwardBatch,
        view: StateView,
        selection: Tensor | None = None,
    ) -> Tensor:
        self._write(latent if k_rope is None else torch.cat((latent, k_rope), dim=-1), view, batch)
        q = q_nope if q_rope is None else torch.cat((q_nope, q_rope), dim=-1)  # [T, heads, Dn + Dr]
        key = (self._kind, view.group, view.data.shape, view.data.stride())
        outs = []
        for regime, span, plan in self._plans.get(batch, key, lambda: self._plan(batch, view)):
            rows = slice(span.rows.start, span.rows.stop)
            outs.append(
                self._attend[regime](
                    q[rows],
                    view,
                    batch,
                    span,
                    kv_b_proj.up,
                    scale=self.scale,
                    absorbed=regime in ABSORBED,
                    selection=None if selection is None else selection[rows],
                    plan=plan,
                )
            )
        return torch.cat(outs).flatten(1) if outs else q.new_zeros(0, self.num_heads * self.value_dim)

    def extra_repr(self) -> str:
        head = f"nope={self.nope_dim}, rope={self.rope_dim}, value={self.value_dim}"
        return f"heads={self.num_heads}, latent={self.latent_dim}, {head}"
