"""Memory in huge pages is ordinary memory in every other respect."""

from __future__ import annotations

import gc

import pytest
import torch

from rtp_kernel.memory import HUGE, _without, available, empty, huge_pages


@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (1024, 1024), (3, 1000, 1001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_empty_is_a_writable_contiguous_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = empty(shape, dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    tensor.copy_(torch.arange(tensor.numel()).view(shape) % 100)
    kept = tensor[-1:].clone()
    view = tensor[-1:]
    del tensor
    gc.collect()
    assert torch.equal(view, kept)


def test_large_tensors_start_on_a_huge_page() -> None:
    assert empty((HUGE,), torch.float32).data_ptr() % HUGE == 0


def test_other_devices_are_left_to_torch() -> None:
    assert empty((HUGE,), torch.float32, "meta").is_meta


def test_huge_pages_leaves_values_alone() -> None:
    with huge_pages():
        tensors = [torch.full((HUGE,), float(place)) for place in range(3)]
    assert all(bool((tensor == place).all()) for place, tensor in enumerate(tensors))


def test_available_memory_is_plausible() -> None:
    bytes_available = available()
    assert bytes_available is None or 1 << 20 < bytes_available < 1 << 50


def test_ranges_are_subtracted() -> None:
    ranges, taken = [(0, 10), (20, 30), (40, 50)], [(2, 4), (8, 22), (25, 26), (45, 60)]
    assert list(_without(ranges, taken)) == [(0, 2), (4, 8), (22, 25), (26, 30), (40, 45)]
    assert list(_without(ranges, [])) == ranges
    assert list(_without(ranges, ranges)) == []
