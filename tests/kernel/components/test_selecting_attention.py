"""Attention over a selection: the component hands each span its rows, and no form that would see more is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rtp_kernel.components import Attention, bind_components
from rtp_kernel.registry import OpTable, default_registry

MIXES: dict[str, dict[str, Any]] = {
    "decode": {"requests": [(10, 1), (3, 1)]},
    "prefill": {"requests": [(0, 9)], "decodes": 0},
    "mixture": {"requests": [(10, 1), (2, 1), (7, 5), (0, 9)], "padding": 2},
    "nothing real": {"requests": [], "padding": 3},
}


def bound(selects: int, deterministic: bool = False) -> tuple[Attention, OpTable]:
    attention = Attention(4, 2, 16, selects=selects)
    table = OpTable(default_registry(), device="cpu", dtype=torch.float32, deterministic=deterministic)
    bind_components(attention, table, "cpu", torch.float32)
    return attention, table


def attend(step: Any, selects: int, selection: Tensor | None) -> Tensor:
    batch, kv = step.build(poison=float("nan"))
    attention, _ = bound(selects)
    out: Tensor = attention(step.q, step.new(step.k), step.new(step.v), batch, kv, selection)
    return out


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("selects", [1, 4])
def test_selecting_all_places_is_attention_to_all_tokens(mix: Any, name: str, selects: int) -> None:
    step = mix(**MIXES[name])
    index = step.build()[0].index
    places = torch.arange(16).expand(step.num_tokens, 2, -1)
    everything = places.masked_fill(places > torch.div(index, selects, rounding_mode="floor")[:, None, None], -1)
    got, want = attend(step, selects, everything), attend(step, 0, None)
    assert torch.allclose(got, want, rtol=0, atol=2e-6)


def test_a_head_group_sees_its_own_selection(mix: Any) -> None:
    """Only itself in group 0: the output is the token's own value."""
    step = mix(requests=[(4, 1), (0, 6)])
    index = step.build()[0].index
    selection = torch.stack((index, torch.zeros_like(index)), dim=1).unsqueeze(-1)
    got = attend(step, 1, selection).view(step.num_tokens, 2, 2, 16)
    values = step.new(step.v)
    first = torch.stack([step.v[0][0], *[step.v[1][0]] * 6])
    assert torch.allclose(got[:, 0], values[:, 0, None].expand(-1, 2, -1), rtol=0, atol=1e-6)
    assert torch.allclose(got[:, 1], first[:, 1, None].expand(-1, 2, -1), rtol=0, atol=1e-6)


def test_forms_that_see_every_token_refuse() -> None:
    _, table = bound(1)
    choices = {choice.regime: choice for choice in table.choices if choice.op == "paged_attention"}
    reasons = {name: " ".join(why) for name, why in choices["decode"].refused}
    taken = {regime: choice.implementation for regime, choice in choices.items()}
    prefill = "cpu_selected_prefill"
    assert taken == {"decode": "cpu_selected_decode", "verify": prefill, "prefill": prefill}
    assert all("every token" in reasons[name] for name in ("cpu_decode_sdpa", "cpu_prefill_sdpa", "flash_attn"))
    _, table = bound(1, deterministic=True)
    assert {c.implementation for c in table.choices if c.op == "paged_attention"} == {"cpu_selected_rows"}


def test_a_selection_is_given_if_and_only_if_the_component_selects(mix: Any) -> None:
    step = mix(requests=[(0, 3)])
    with pytest.raises(ValueError, match="needs a selection"):
        attend(step, 1, None)
    with pytest.raises(ValueError, match="needs a selection"):
        attend(step, 0, torch.zeros(3, 1, 1, dtype=torch.long))
