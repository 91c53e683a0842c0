"""The tokens before each token, over packed requests and their slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rtp_kernel.ops.token_context import previous_tokens

MIXES = ("prefill", "decode", "mixture", "copies", "drafts", "padding", "empty requests", "nothing real")


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("name", MIXES)
def test_is_the_end_of_each_history(slot_mixes: Any, name: str, count: int) -> None:
    mix = slot_mixes[name]
    ids = torch.randint(3, 99, (mix.num_tokens,))
    states = torch.randint(3, 99, (len(mix.lens), count)).double()  # a float type, so that free slots can hold NaN
    states[list(mix.new)] = 0
    batch, view = mix.build(states)
    got = previous_tokens(view, replace(batch, input_ids=ids))
    assert got.shape == (mix.num_tokens, count) and got.dtype == torch.int64
    histories = [torch.cat((states[r].long(), ids[mix.rows(r)])).tolist() for r in range(len(mix.lens))]
    for request, length in enumerate(mix.lens):
        rows = got[mix.rows(request)].tolist()
        wanted = [histories[request][place : place + count][::-1] for place in range(length)]
        assert rows == wanted
    assert not got[mix.num_tokens - mix.padding :].any()

    def after(request: int, length: int) -> Tensor:
        return torch.tensor(histories[request][length : length + count]).double()

    mix.check(after, view, batch, 0.0)
