"""Block-diagonal products against transformers' DeepSeek-V4."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

from rtp_kernel.components import GroupedLinear, bind_components
from rtp_kernel.registry import OpTable, default_registry


@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("tokens", [5, 0])
def test_multiplies_as_the_reference(groups: int, tokens: int) -> None:
    reference, ours = DeepseekV4GroupedLinear(12, 5 * groups, groups), GroupedLinear(12, 5 * groups, groups)
    ours.load_state_dict(reference.state_dict())
    bind_components(ours, OpTable(default_registry(), device="cpu", dtype=torch.float32), "cpu", torch.float32)
    x = torch.randn(tokens, groups, 12)
    with torch.no_grad():
        assert ours(x).shape == (tokens, groups, 5)
        assert not tokens or torch.allclose(ours(x), reference(x[None])[0], rtol=1e-6, atol=1e-6)


def test_an_output_that_groups_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="7 output features cannot be dealt to 2 groups"):
        GroupedLinear(4, 7, 2)
