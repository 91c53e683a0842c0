"""Which tensors are compared where the reference holds one module's values in another form."""

from __future__ import annotations

import torch

from rtp_runtime.check.capture import per_token
from rtp_runtime.check.pairs import pair_tensors


def test_heads_before_tokens_are_turned_into_rows() -> None:
    heads_first = torch.arange(2 * 5 * 3.0).view(1, 2, 5, 3)
    found = per_token(heads_first, 5)
    assert found is not None and torch.equal(found, heads_first[0].transpose(0, 1))
    assert per_token(torch.zeros(1, 1, 5, 5), 5) is None


def test_parts_of_ours_are_joined_for_one_tensor_of_the_reference() -> None:
    whole = torch.randn(6, 10)
    pairing = pair_tensors(list(whole.split([4, 3, 3], dim=-1)), [whole])
    assert not pairing.unmatched and torch.equal(pairing.pairs[0].ours, whole)


def test_parts_in_another_order_are_joined_as_they_come() -> None:
    whole = torch.randn(6, 10)
    q, k, v = whole.split([4, 3, 3], dim=-1)
    pairing = pair_tensors([q, v, k], [whole])
    assert not torch.equal(pairing.pairs[0].ours, pairing.pairs[0].reference)


def test_angles_in_pairs_are_compared_with_angles_in_halves() -> None:
    angles = torch.randn(6, 4)
    ours, theirs = torch.cat((angles, angles), dim=-1), angles.repeat_interleave(2, dim=-1)
    (pair,) = pair_tensors([ours], [theirs]).pairs
    assert torch.equal(pair.ours, pair.reference)
    (wrong,) = pair_tensors([ours.flip(0)], [theirs]).pairs
    assert not torch.equal(wrong.ours, wrong.reference)
