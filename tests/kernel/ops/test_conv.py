"""The causal convolution against torch's, over packed requests and their slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.mamba.modeling_mamba import causal_conv1d_fn as mamba_conv1d_fn
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

from rtp_kernel.ops.conv import causal_conv

MIXES = ("prefill", "decode", "mixture", "copies", "drafts", "padding", "empty requests", "nothing real")


@pytest.mark.parametrize("kernel", [2, 3, 4, 9])
@pytest.mark.parametrize("name", MIXES)
def test_is_that_of_transformers(slot_mixes: Any, name: str, kernel: int) -> None:
    mix, channels = slot_mixes[name], 10
    x, weight = torch.randn(mix.num_tokens, channels), torch.randn(channels, 1, kernel)
    x[mix.num_tokens - mix.padding :] = float("nan")
    states = torch.randn(len(mix.lens), channels, kernel - 1)
    states[list(mix.new)] = 0
    batch, view = mix.build(states)
    got = causal_conv(x, weight, view, batch)
    for request, length in enumerate(mix.lens):
        if length:
            inputs = torch.cat((states[request].t(), x[mix.rows(request)]))
            want = causal_conv1d_fn(inputs.t()[None], weight[:, 0], activation="silu")[0].t()[-length:]
            assert torch.allclose(got[mix.rows(request)], want, rtol=1e-6, atol=4e-6)
    assert bool((got[mix.num_tokens - mix.padding :] == 0).all())

    def after(request: int, length: int) -> Tensor:
        rows = x[mix.rows(request)][:length]
        return torch.cat((states[request].t(), rows))[1 - kernel :].t()

    mix.check(after, view, batch, 0.0)


@pytest.mark.parametrize(("kernel", "dilation"), [(2, 3), (4, 3), (3, 2)])
@pytest.mark.parametrize("name", MIXES)
def test_taps_apart(slot_mixes: Any, name: str, kernel: int, dilation: int) -> None:
    """Against torch's dilated convolution of each request's whole history."""
    mix, channels, taps = slot_mixes[name], 6, (kernel - 1) * dilation
    x, weight = torch.randn(mix.num_tokens, channels), torch.randn(channels, 1, kernel)
    states = torch.randn(len(mix.lens), channels, taps)
    states[list(mix.new)] = 0
    batch, view = mix.build(states)
    got = causal_conv(x, weight, view, batch, activation=None, dilation=dilation)
    for request, length in enumerate(mix.lens):
        if length:
            inputs = torch.cat((states[request], x[mix.rows(request)].t()), dim=1)
            want = functional.conv1d(inputs, weight, groups=channels, dilation=dilation).t()
            assert torch.allclose(got[mix.rows(request)], want, rtol=1e-6, atol=4e-6)

    def after(request: int, length: int) -> Tensor:
        return torch.cat((states[request].t(), x[mix.rows(request)][:length]))[-taps:].t()

    mix.check(after, view, batch, 0.0)


@pytest.mark.parametrize("name", ["mixture", "drafts"])
def test_bias(slot_mixes: Any, name: str) -> None:
    mix, channels = slot_mixes[name], 10
    x, weight, bias = torch.randn(mix.num_tokens, channels), torch.randn(channels, 1, 4), torch.randn(channels)
    states = torch.zeros(len(mix.lens), channels, 3)
    batch, view = mix.build(states)
    got = causal_conv(x, weight, view, batch, bias=bias)
    for request in range(len(mix.lens)):
        want = mamba_conv1d_fn(x[mix.rows(request)].t()[None], weight[:, 0], bias, activation="silu")[0].t()
        assert torch.allclose(got[mix.rows(request)], want, rtol=1e-6, atol=4e-6)


def test_float32_weight_of_a_narrower_model(slot_mixes: Any) -> None:
    """GLM-5.3 convolves and activates in float32, then casts."""
    mix = slot_mixes["mixture"]
    x, weight = torch.randn(mix.num_tokens, 6).bfloat16(), torch.randn(6, 1, 4)
    states = torch.zeros(len(mix.lens), 6, 3, dtype=torch.bfloat16)
    batch, view = mix.build(states)
    got = causal_conv(x, weight, view, batch)
    assert got.dtype == torch.bfloat16
    want = causal_conv1d_fn(x[mix.rows(2)].t()[None], weight[:, 0], activation="silu")[0].t()
    assert torch.allclose(got[mix.rows(2)].float(), want.float(), rtol=1e-2, atol=1e-6)


def test_no_activation(slot_mixes: Any) -> None:
    mix = slot_mixes["decode"]
    x, weight = torch.randn(mix.num_tokens, 6), torch.randn(6, 1, 2)
    batch, view = mix.build(torch.zeros(len(mix.lens), 6, 1))
    got = causal_conv(x, weight, view, batch, activation=None)
    assert torch.allclose(got, x * weight[:, 0, 1], rtol=0, atol=1e-6)
