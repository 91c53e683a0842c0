"""Selections are sets, and ties are what their scores say: units in the last place, as many in as out."""

from __future__ import annotations

import torch

from rtp_runtime.check.capture import seen_through
from rtp_runtime.check.pairs import pair_tensors
from rtp_runtime.check.selections import Choices, is_selection, tied


def test_order_and_padding_mean_nothing() -> None:
    ours, reference = torch.tensor([[3, 1, -1], [0, 2, 4]]), torch.tensor([[1, 3], [0, 4]])
    assert Choices(ours, reference).changed.tolist() == [False, True]
    mask = torch.tensor([[[False, True, False, True]], [[True, False, True, False]]])
    assert Choices(ours, mask).changed.tolist() == [False, True]
    assert is_selection(ours) and is_selection(mask)
    assert not is_selection(torch.arange(3)) and not is_selection(torch.ones(2, 2))


def test_choices_of_heads_meet_choices_of_their_groups() -> None:
    ours = torch.tensor([[[0], [2]]])
    heads = torch.tensor([[[0], [0], [2], [2]]])
    assert not Choices(ours, heads).changed.any()
    assert Choices(ours, heads.flip(1)).changed.all()


def test_only_equal_scores_may_stand_for_each_other() -> None:
    near = 1.0 + 3 * 2.0**-23  # three units in the last place
    far = 1.0 + 6 * 2.0**-23
    scores = torch.tensor([[[5.0, 1.0, near, 0.5]], [[5.0, 1.0, far, 0.5]], [[5.0, 1.0, 0.9, 0.5]]])
    ours, theirs = torch.tensor([[0, 2], [0, 2], [0, 1]]), torch.tensor([[0, 1], [0, 1], [0, 3]])
    assert tied(Choices(ours, theirs), scores, 2).tolist() == [True, False, False]


def test_a_smaller_selection_is_no_tie() -> None:
    scores = torch.tensor([[[5.0, 1.0, 1.0]]])
    assert not tied(Choices(torch.tensor([[0]]), torch.tensor([[0, 1]])), scores, 2).any()


def test_what_cannot_be_seen_is_no_tie() -> None:
    scores = torch.tensor([[[5.0, float("-inf"), float("-inf")]]])
    assert not tied(Choices(torch.tensor([[0, 1]]), torch.tensor([[0, 2]])), scores, 2).any()
    assert not tied(Choices(torch.tensor([[0, 1]]), torch.tensor([[0, 9]])), torch.ones(1, 1, 3), 2).any()


def test_masks_over_tokens_as_the_places_that_hold_them() -> None:
    ours = torch.tensor([[[True, True, False, False, True]]])
    theirs = torch.tensor([[[False, False, True, True, True]]])
    places = Choices(ours, theirs).in_places(2)
    assert [mask.tolist() for mask in places.sets()] == [[[[True, False, True]]], [[[False, True, True]]]]


def test_selections_do_not_count_as_values() -> None:
    pairing = pair_tensors([torch.ones(2, 4), torch.zeros(2, 3).long()], [torch.ones(2, 4), torch.ones(2, 3).long()])
    assert (len(pairing.pairs), len(pairing.selections), pairing.unmatched) == (1, 1, ())


def test_windows_selections_and_compressed_keys_are_told_apart() -> None:
    distance = torch.arange(5)[:, None] - torch.arange(5)
    causal, band = distance >= 0, (distance >= 0) & (distance < 2)
    assert seen_through(causal[None, None]) == (None, None)
    assert seen_through(band[None, None]) == (2, None)
    chosen = causal.clone()
    chosen[4, 1:3] = False
    window, visible = seen_through(chosen[None, None])
    assert window is None and visible is not None and visible.shape == (5, 1, 5)
    entries = torch.cat((band, torch.ones(5, 2, dtype=torch.bool)), dim=1)
    window, visible = seen_through(entries[None, None])
    assert window == 2 and visible is not None and visible.shape == (5, 1, 7)
