"""How many routed experts to keep, and the config that says so: the keys are found by trying, on the meta device."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from rtp_runtime.check.cut.edits import Edits, KeyPath, TextPart
from rtp_runtime.check.cut.outline import Outline, outline
from rtp_runtime.errors import NotJudgedError, UsageError

CHOSEN = re.compile(r".*(experts?_per_tok(en)?|top_?k_experts?|experts?_top_?k|moe_(router_)?top_?k|moe_k)")
"""How configs call the number of experts that a token goes to."""
GROUPS = re.compile(r"n_group|num_expert_groups?|n_expert_groups?|moe_n_groups?")
CHOSEN_GROUPS = re.compile(r"topk_groups?|top_k_groups?|n_limited_groups?|num_limited_groups?|moe_topk_groups?")


@dataclass(frozen=True)
class Routing:
    """The numbers of a config that decide among how many experts a token's are chosen, and the keys that hold them."""

    num_experts: int
    keys: tuple[KeyPath, ...]
    """Of the number of experts."""
    chosen: int
    chosen_keys: tuple[KeyPath, ...]
    groups: int = 1
    group_keys: tuple[KeyPath, ...] = ()
    chosen_groups: int = 1
    chosen_group_keys: tuple[KeyPath, ...] = ()

    @property
    def fewest(self) -> int:
        """The fewest experts with which a token still has a choice and nothing else of the routing changes."""
        most = self.num_experts
        for count in range(2 * self.chosen, most):
            per_group = count // self.groups
            if (
                count % self.groups == 0
                and per_group >= self._per_group
                and self.chosen_groups * per_group >= self.chosen
            ):
                return count
        return most

    @property
    def _per_group(self) -> int:
        """Experts that a group needs: the two best of a group are its score."""
        return min(2, self.num_experts // self.groups)

    def kept(self, count: int) -> tuple[Edits, list[str]]:
        """The edits that keep `count` experts, and what changed besides, in words.

        Raises:
            UsageError: fewer than one, or more than there are.
        """
        if not 1 <= count <= self.num_experts:
            raise UsageError(f"--experts {count}: the model has {self.num_experts} routed experts; give 1 to that many")
        groups = max(
            number for number in range(1, self.groups + 1)
            if count % number == 0 and (number == 1 or count // number >= self._per_group)
        )  # fmt: skip
        chosen_groups = max(1, min(groups, round(self.chosen_groups * groups / self.groups)))
        chosen = min(self.chosen, chosen_groups * (count // groups))
        edits: Edits = dict.fromkeys(self.keys, count)
        words = []
        for keys, before, now, what in (
            (self.group_keys, self.groups, groups, "groups of experts"),
            (self.chosen_group_keys, self.chosen_groups, chosen_groups, "groups that a token may choose"),
            (self.chosen_keys, self.chosen, chosen, "experts that a token chooses"),
        ):
            if now != before:
                edits |= dict.fromkeys(keys, now)
                words.append(f"{what}: {now} of {before}")
        return edits, words


def find_routing(part: TextPart, edits: Edits) -> Routing | None:
    """The routing of a config after `edits`; None for a model without routed experts.

    Raises:
        NotJudgedError: transformers cannot build the model.
    """
    whole = outline(part, edits)
    counts = {
        path: value
        for path, value in part.integers()
        if value > 1 and path not in edits and _takes_experts_away(part, edits, whole, path, value)
    }
    if not counts:
        return None
    total = max(counts.values())
    named = {pattern: _named(part, pattern, total) for pattern in (CHOSEN, GROUPS, CHOSEN_GROUPS)}
    chosen, groups, some = (named[pattern] for pattern in (CHOSEN, GROUPS, CHOSEN_GROUPS))
    number = max(groups.values(), default=1)
    return Routing(
        total,
        tuple(path for path, value in counts.items() if value == total),
        max(chosen.values(), default=1),
        tuple(chosen),
        max(1, number),
        tuple(groups),
        max(1, max(some.values(), default=1)) if number > 1 else 1,
        tuple(some),
    )


def _named(part: TextPart, pattern: re.Pattern[str], most: int) -> dict[KeyPath, int]:
    return {path: value for path, value in part.integers() if pattern.fullmatch(path[0]) and 1 <= value <= most}


def _takes_experts_away(part: TextPart, edits: Edits, whole: Outline, path: KeyPath, value: int) -> bool:
    """Whether one less of this number takes one row or one numbered module away in layers, and nothing else."""
    try:
        less = outline(part, {**edits, path: value - 1})
    except NotJudgedError:
        return False
    if len(less.layers) != len(whole.layers) or not less.same_around(whole):
        return False
    stacks = gone = rows = 0
    for name in whole.layers:
        old, new = _shapes(whole.model.get_submodule(name)), _shapes(less.model.get_submodule(name))
        left_out = [tensor for tensor in old if tensor not in new]
        cut = [tensor for tensor in old if new.get(tensor, old[tensor]) != old[tensor]]
        if new.keys() - old.keys() or not all(str(value - 1) in tensor.split(".") for tensor in left_out):
            return False
        if any(old[tensor] != (new[tensor][0] + 1, *new[tensor][1:]) for tensor in cut if new[tensor]):
            return False
        stacks += sum(len(old[tensor]) == 3 for tensor in cut)
        gone, rows = gone + len(left_out), rows + len(cut)
    return bool((stacks or gone) and rows)


def _shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in (*layer.named_parameters(), *layer.named_buffers())}
