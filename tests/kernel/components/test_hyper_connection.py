"""Hyper-connections against the modules of transformers' DeepSeek-V4 and GLM-5.3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

from rtp_kernel.components import HyperConnection, HyperHead, bind_components
from rtp_kernel.registry import OpTable, default_registry

HIDDEN = 20
NUMBERS: dict[str, Any] = {"eps": 1e-6, "norm_eps": 1e-5}


def _config(streams: int, iterations: int = 20) -> Any:
    return DeepseekV4Config(
        hidden_size=HIDDEN, hc_mult=streams, hc_sinkhorn_iters=iterations, hc_eps=1e-6, rms_norm_eps=1e-5
    )


def _like(ours: nn.Module, reference: nn.Module) -> None:
    """The same random parameters in both, and the ops of the default registry in ours."""
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_()
    ours.load_state_dict(reference.state_dict())
    bind_components(ours, OpTable(default_registry(), device="cpu", dtype=torch.float32), "cpu", torch.float32)


def _close(ours: Tensor, wanted: Tensor) -> bool:
    return ours.dtype == wanted.dtype and torch.allclose(ours, wanted[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("streams", "iterations"), [(4, 20), (3, 5), (2, 1), (1, 20)])
@pytest.mark.parametrize("tokens", [7, 1])
def test_mixes_as_the_reference(streams: int, iterations: int, tokens: int) -> None:
    reference = DeepseekV4HyperConnection(_config(streams, iterations))
    ours = HyperConnection(HIDDEN, streams, iterations=iterations, **NUMBERS)
    _like(ours, reference)
    hidden = torch.randn(tokens, streams, HIDDEN)
    with torch.no_grad():
        found, wanted = ours(hidden), reference(hidden[None])
    assert all(_close(part, expected) for part, expected in zip(found, wanted, strict=True))


def test_takes_no_tokens() -> None:
    hc, head = HyperConnection(HIDDEN, 3, iterations=4, **NUMBERS), HyperHead(HIDDEN, 3, **NUMBERS)
    none = torch.empty(0, 3, HIDDEN)
    post, comb, x = hc(none)
    assert (post.shape, comb.shape, x.shape) == ((0, 3), (0, 3, 3), (0, HIDDEN))
    assert hc.expand(post, comb, x, none).shape == none.shape and head(none).shape == x.shape


def test_returns_the_output_as_the_decoder_layer() -> None:
    streams, out = torch.randn(5, 4, HIDDEN), torch.randn(5, HIDDEN)
    hc = HyperConnection(HIDDEN, 4, iterations=3, **NUMBERS)
    post, comb = torch.rand(5, 4), torch.rand(5, 4, 4)
    wanted = post.unsqueeze(-1) * out.unsqueeze(-2) + torch.einsum("tij,tid->tjd", comb, streams)
    assert torch.allclose(hc.expand(post, comb, out, streams), wanted, atol=1e-6)


def test_narrow_streams_keep_their_dtype_and_float32_weights() -> None:
    reference = DeepseekV4HyperConnection(_config(4))
    ours = HyperConnection(HIDDEN, 4, iterations=20, **NUMBERS)
    _like(ours, reference)
    hidden = torch.randn(6, 4, HIDDEN, dtype=torch.bfloat16)
    post, comb, x = ours(hidden)
    assert (post.dtype, comb.dtype, x.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    assert torch.equal(x, reference(hidden[None])[2][0])
    assert ours.expand(post, comb, x, hidden).dtype == torch.bfloat16


@pytest.mark.parametrize("streams", [4, 3, 1])
def test_collapses_as_the_reference(streams: int) -> None:
    reference = DeepseekV4HyperHead(_config(streams))
    ours = HyperHead(HIDDEN, streams, **NUMBERS)
    _like(ours, reference)
    hidden = torch.randn(9, streams, HIDDEN)
    with torch.no_grad():
        assert _close(ours(hidden), reference(hidden[None]))


def test_numbers_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="0 streams"):
        HyperConnection(HIDDEN, 0, iterations=1, **NUMBERS)
