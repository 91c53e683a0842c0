"""What is known of a model's weights: the headers, the audit that chose the layout, and the plan that is read."""

from __future__ import annotations

from dataclasses import dataclass

from rtp_runtime.weights.audit import Audit
from rtp_runtime.weights.headers import Headers
from rtp_runtime.weights.plan import LoadPlan
from rtp_runtime.weights.resolve import Parameter, ResolvedLayout


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """The layout that was taken, and where its bytes came from."""

    headers: Headers
    audit: Audit
    plan: LoadPlan

    @property
    def layout(self) -> ResolvedLayout:
        return self.audit.layout

    def parameter(self, name: str) -> Parameter:
        """The entry of one parameter; a tied one is the parameter it is tied to. Raises KeyError."""
        target = next((tie.to for tie in self.layout.ties if tie.parameter == name), name)
        return self.layout.by_name[target]
