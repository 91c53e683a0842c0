"""Components of state spaces: what they ask for when bound, and that a deterministic table serves them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rtp_kernel.components import CausalConv, SelectiveScan, StateSpaceScan, bind_components
from rtp_kernel.registry import OpTable, default_registry


@pytest.mark.parametrize("deterministic", [False, True])
def test_bound_and_unbound_agree(slot_mixes: Any, deterministic: bool) -> None:
    mix = slot_mixes["mixture"]
    tokens, count = mix.num_tokens, len(mix.lens)
    selective, space, conv = (
        SelectiveScan(10, 4),
        StateSpaceScan(6, 5, 7, 2, limits=(0.01, 9)),
        CausalConv(8, 3, bias=True),
    )
    conv.weight.normal_()
    assert conv.bias is not None
    conv.bias.normal_()
    rows = [torch.randn(tokens, width) for width in (10, 10, 4, 4, 10)]
    more = [torch.randn(tokens, width) for width in (30, 6, 14, 14)]
    held, heads = (torch.rand(10, 4), torch.randn(10), torch.randn(10)), torch.randn(3, 6)
    states = torch.randn(count, 10, 4), torch.randn(count, 6, 5, 7), torch.randn(count, 8, 2)
    x = torch.randn(tokens, 8)

    def run() -> list[Any]:
        batches = [mix.build(state) for state in states]
        return [
            selective(*rows, *held, *batches[0]),
            space(*more, *heads, *batches[1]),
            conv(x, *batches[2]),
        ]

    before = run()
    table = OpTable(default_registry(), device="cpu", dtype=torch.float32, deterministic=deterministic)
    bind_components(torch.nn.ModuleList((selective, space, conv)), table, "cpu", torch.float32)
    assert {choice.op for choice in table.choices} == {"selective_scan", "state_space_scan", "causal_conv"}
    for ours, bound in zip(before, run(), strict=True):
        assert torch.allclose(ours, bound, rtol=0, atol=2e-5)


def test_heads_are_a_multiple_of_groups() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        StateSpaceScan(3, 4, 5, 2)
