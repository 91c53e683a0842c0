"""Attention to a selection on the CPU against the reference, with NaN wherever nothing may be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rtp_kernel.backends.cpu import selected
from rtp_kernel.backends.cpu.selected import SelectedDecode, SelectedPrefill
from rtp_kernel.ops.attention import paged_attention, spans, write_kv
from rtp_kernel.registry import OpContext

MIXES: dict[str, dict[str, Any]] = {
    "prefill": {"requests": [(0, 11), (0, 4), (0, 1)], "decodes": 0},
    "chunk": {"requests": [(5, 6), (8, 3)]},
    "decode": {"requests": [(10, 1), (0, 1), (3, 1)]},
    "mixture": {"requests": [(10, 1), (2, 1), (7, 5), (0, 9)]},
    "padding": {"requests": [(10, 1), (2, 3)], "padding": 4},
    "gaps between blocks": {"requests": [(10, 1), (2, 3)], "gap": 5, "block_size": 3},
    "half": {"requests": [(10, 1), (2, 3)], "dtype": torch.bfloat16},
    "nothing real": {"requests": [], "padding": 3},
}


def choose(step: Any, groups: int, size: int) -> Tensor:
    """Three different places at random of those that a request's tokens have, some behind the query, or -1."""
    rows = []
    for held, new in step.requests:
        places = torch.rand(new, groups, max(3, -(-(held + new) // size))).argsort(-1)[..., :3]
        rows.append(places.masked_fill(places * size >= held + new, -1))
    return torch.cat([*rows, torch.full((step.padding, groups, 3), -1)])


def run(step: Any, selection: Tensor, size: int, attend: Any) -> Tensor:
    batch, kv = step.build(poison=float("nan"))
    write_kv(step.new(step.k), step.new(step.v), kv, batch)
    options = {"scale": 0.3, "window": None, "sinks": None, "soft_cap": None, "tokens_per_place": size}
    parts = [
        attend(regime)(step.q[s.rows.start : s.rows.stop], kv, batch, s, selection=selection[s.rows], **options)
        for regime, s in spans(batch)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("size", [1, 4])
def test_agrees_with_the_reference(mix: Any, name: str, groups: int, size: int) -> None:
    step = mix(**MIXES[name], heads=6, kv_heads=3)
    selection = choose(step, groups, size)
    want = run(step, selection, size, lambda regime: paged_attention)
    got = run(step, selection, size, lambda regime: SelectedDecode() if regime == "decode" else SelectedPrefill())
    tolerance = 2e-6 if step.dtype == torch.float32 else 2e-2
    assert torch.allclose(got, want, rtol=0, atol=tolerance)


def test_decodes_that_gather_much_go_few_at_a_time(mix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = mix(requests=[(10, 1), (9, 1), (8, 1), (11, 1)])
    selection = choose(step, 2, 1)
    whole = run(step, selection, 1, lambda regime: SelectedDecode())
    monkeypatch.setattr(selected, "MAX_GATHERED", 7)
    assert torch.allclose(run(step, selection, 1, lambda regime: SelectedDecode()), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"regime": "prefill"}, "serves decode only"),
        ({"options": {}}, "attends to a selection only"),
        ({"options": {"selects": 1, "sinks": True}}, "has no sinks"),
        ({"options": {"selects": 1, "window": 4}}, "has no window"),
        ({"deterministic": True}, "depends on the queries beside it"),
    ],
)
def test_says_what_it_serves(fields: dict[str, Any], reason: str | None) -> None:
    defaults = {"device": "cpu", "dtype": torch.float32, "regime": "decode", "options": {"selects": 4}}
    support = SelectedDecode().supports(OpContext(**{**defaults, **fields}))
    assert support.ok == (reason is None)
    assert reason is None or reason in support.reasons[-1]
    assert SelectedPrefill().supports(OpContext(**{**defaults, **fields})).ok == (
        reason in (None, "serves decode only")
    )
