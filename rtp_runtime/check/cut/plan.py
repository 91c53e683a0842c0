"""What of a model is checked: the layers and experts asked for, or those with which the memory suffices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtp_runtime.check.cut.edits import Edits, TextPart
from rtp_runtime.check.cut.experts import Routing, find_routing
from rtp_runtime.check.cut.layers import KINDS, Chosen, choose_layers, edits_for_layers
from rtp_runtime.check.cut.memory import Estimate, estimate, size
from rtp_runtime.check.cut.outline import Outline, outline
from rtp_runtime.check.names import ranges
from rtp_runtime.errors import UsageError


@dataclass(frozen=True)
class Plan:
    """What is kept of a model, and what that takes."""

    part: TextPart
    edits: Edits
    outline: Outline
    """The model that is left, on the meta device."""
    estimate: Estimate
    chosen: Chosen | None
    """The layers; None: all of them."""
    routing: Routing | None
    """The whole model's, where experts are cut."""
    experts: int | None
    """Experts that are kept; None: all."""
    notes: list[str] = field(default_factory=list)
    """What else changed or was chosen, and why, in words."""

    @property
    def cuts(self) -> bool:
        return bool(self.edits)


def make_plan(part: TextPart, layers: str | None, experts: int | None, say: Callable[[str], None]) -> Plan:
    """Keep what was asked for; where that does not fit, and nothing was said of layers or experts, choose.

    Raises:
        UsageError: layers or experts that the model does not have, or a model that does not fit however it is cut.
        NotJudgedError: transformers cannot build it.
    """
    say("what the model is made of")
    plan = _plan(part, choose_layers(part, layers) if layers is not None else None, experts, [])
    if not plan.estimate.holds_streamed and layers is None:
        note = f"one layer of each kind, since all take {size(plan.estimate.streamed)} (--layers says otherwise)"
        plan = _plan(part, choose_layers(part, KINDS), experts, [note])
    if not plan.estimate.holds_streamed and experts is None:
        plan = _with_fewer_experts(part, plan)
    if not plan.estimate.holds_streamed:
        raise UsageError(
            f"a check takes {size(plan.estimate.streamed)} for our model in float32 and the reference streamed beside "
            f"it ({plan.estimate.num_parameters / 1e9:.1f} G parameters), and there are "
            f"{size(plan.estimate.there or 0)}: {_advice(layers, experts)}"
        )
    say(plan.estimate.describe())
    return plan


def _with_fewer_experts(part: TextPart, plan: Plan) -> Plan:
    """With as few experts as leave the routing as it is; where that is still too much, with as few as it chooses."""
    routing = find_routing(part, plan.chosen.edits if plan.chosen is not None else {})
    whole = plan
    for count in (routing.fewest, routing.chosen) if routing is not None else ():
        if not plan.estimate.holds_streamed and routing is not None and count < routing.num_experts:
            note = f"{count} experts, since all take {size(whole.estimate.streamed)} (--experts says otherwise)"
            plan = _plan(part, whole.chosen, count, [*whole.notes, note])
    return plan


def _advice(layers: str | None, experts: int | None) -> str:
    if layers is not None and layers != KINDS:
        return "keep fewer layers (--layers kinds) or experts (--experts), or use a larger machine"
    if experts is not None:
        return f"keep fewer experts than {experts} (--experts), or use a larger machine"
    return "its widths alone take this; use a larger machine"


def _plan(part: TextPart, chosen: Chosen | None, experts: int | None, notes: list[str]) -> Plan:
    edits: Edits = dict(chosen.edits) if chosen is not None else {}
    notes = [*notes, chosen.note] if chosen is not None and chosen.note else list(notes)
    routing = None
    if experts is not None:
        routing = find_routing(part, edits)
        if routing is None:
            raise UsageError(f"--experts {experts}: none of the layers that are kept has routed experts; leave it out")
        more, words = routing.kept(experts)
        edits |= more if experts < routing.num_experts else {}
        notes += words
    left = outline(part, edits)
    takes = estimate(sum(parameter.numel() for parameter in left.model.parameters()), _widest(left))
    cut = routing is not None and experts is not None and experts < routing.num_experts
    notes = list(dict.fromkeys(notes))
    return Plan(part, edits, left, takes, chosen, routing if cut else None, experts if cut else None, notes)


def _widest(left: Outline) -> int:
    """Parameters of the widest module inside the layers; those outside are read in parts."""
    layers = [left.model.get_submodule(name) for name in left.layers]
    modules = (module for layer in layers for module in layer.modules())
    return max((sum(each.numel() for each in module.parameters(recurse=False)) for module in modules), default=0)


def same_cut(plan: Plan, part: TextPart) -> Plan:
    """The same layers and experts of another config.

    Raises:
        UsageError: it has other layers or experts, so that they cannot be cut alike.
        NotJudgedError: transformers cannot build it.
    """
    edits: Edits = {}
    if plan.chosen is not None:
        found = edits_for_layers(part, plan.chosen.layers)
        if found is None:
            kept = ", ".join(map(str, plan.chosen.layers))
            raise UsageError(f"--reference: its config cannot be cut to layers {kept} as the model's can")
        edits |= found
    if plan.routing is not None and plan.experts is not None:
        routing = find_routing(part, edits)
        if routing is None or routing.num_experts != plan.routing.num_experts:
            raise UsageError(
                "--reference: it has another number of experts than the model, so they cannot be cut alike"
            )
        edits |= routing.kept(plan.experts)[0]
    left = outline(part, edits)
    return Plan(part, edits, left, plan.estimate, plan.chosen, plan.routing, plan.experts, plan.notes)


def text_part(path: Path) -> TextPart:
    """The config in a directory or file. Raises ConfigError, NotJudgedError."""
    from rtp_runtime.model import load_config

    return TextPart.of(load_config(path))


def describe(plan: Plan, random: bool, seed: int) -> dict[str, Any]:
    """What was cut, as data and in words."""
    words, told = [], dict[str, Any]()
    if plan.chosen is not None and plan.chosen.edits:
        kept = plan.chosen.layers
        words.append(f"layers {ranges(kept)} of {plan.chosen.num_layers}")
        told["layers"] = {"kept": list(kept), "of": plan.chosen.num_layers, "kinds": list(map(list, plan.chosen.kinds))}
    if plan.routing is not None:
        words.append(f"{plan.experts} of {plan.routing.num_experts} experts")
        told["experts"] = {"kept": plan.experts, "of": plan.routing.num_experts}
    if random:
        words.append(f"random weights (seed {seed})")
    told |= {
        "weights": f"random, seed {seed}" if random else "the checkpoint's",
        "config": {".".join(path): value for path, value in plan.edits.items()},
        "notes": list(plan.notes),
        "memory": plan.estimate.describe(),
    }
    return {"words": "; ".join(words), **told}
