"""Choices that rounding decides: where our ordinary run, with nothing put in, chose other experts or places.

Given the reference's input, every layer was found to choose as it does, or among equals. In an ordinary run the inputs
differ by the rounding of all layers before. Where a token's input agrees up to that, and its choice does not, rounding
has decided, and logits from that token on say nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rtp_runtime.check.capture import Capture
from rtp_runtime.check.ours import ModuleError, Schedule
from rtp_runtime.check.pairs import Pairing
from rtp_runtime.check.probe_table import ProbeKey
from rtp_runtime.check.probes import ProbeRun, value_of
from rtp_runtime.check.rows import Segment
from rtp_runtime.check.selections import Choices
from rtp_runtime.check.session import Case, Session

ROUNDING = 1e-4
"""Relative difference of a token's layer input, at most, that the rounding of the layers before makes."""


class FreeRun(ProbeRun):
    """Listens to an ordinary run: nothing is put in, and only choices are compared."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._near: dict[str, Tensor] = {}
        """Prompt -> [tokens] bool: whose input of the current layer agrees up to rounding."""

    def _graft(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            for segment, call in self._calls(name):
                ours, wanted = value_of(args[0])[segment.rows].flatten(1), call.inputs[0][segment.index].flatten(1)
                near = torch.zeros(self.captures[segment.prompt].num_tokens, dtype=torch.bool)
                if ours.shape == wanted.shape:
                    near[segment.index] = (ours - wanted).norm(dim=1) <= ROUNDING * wanted.norm(dim=1)
                self._near[segment.prompt] = near

        return hook

    def _add(self, key: ProbeKey, segment: Segment, pairing: Pairing) -> None:
        for pair in pairing.pairs:
            if pair.changed is not None:
                self._note(segment, pair.changed)

    def compare_choices(
        self, key: ProbeKey, part: Segment, choices: Choices, ties: Tensor, pick: Callable[[Capture], Tensor]
    ) -> None:
        self._note(part, choices.changed)

    def _note(self, segment: Segment, changed: Tensor) -> None:
        near = self._near.get(segment.prompt)
        found = segment.index[changed & near[segment.index]] if near is not None else changed[:0]
        if len(found):
            first = int(found.min())
            self.tie_tokens[segment.prompt] = min(first, self.tie_tokens.get(segment.prompt, first))


def settle(session: Session, case: Case, schedule: Schedule) -> bool:
    """Look for the first token for which rounding decided; logits from there on say nothing.

    Returns whether one was found. A model that chooses nothing, or whose modules differ, is not looked at.
    """
    chooses = bool(session.num_experts or session.selections)
    key = (case.name, str(schedule))
    if not chooses or session.modules_differ or key in session.settled:
        return False
    session.settled.add(key)
    model = session.model
    _, capture = session.reference.capture(case.sequence)
    run = FreeRun.over(session, {case.name: capture})
    try:
        with run.attached(model.ops):
            model.run({case.name: case.sequence}, 1, schedule, keep_logits=False)
    except ModuleError:
        return False
    found = run.tie_tokens.get(case.name)
    known = session.first_ties.get(case.name)
    if found is None or (known is not None and known <= found):
        return False
    session.first_ties[case.name] = found
    return True
