"""The gated delta rule against the forms in transformers: chunked and recurrent, one decay per head or per channel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.glm5_next import modeling_glm5_next as glm
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from rtp_kernel.backends.cpu.delta_rule import InPlaceDeltaRule
from rtp_kernel.ops.delta_rule import Tokens, chunked, gated_delta_rule, recurrent
from rtp_kernel.registry import OpContext, default_registry

TOLERANCE = 6e-6
MIXES = ("prefill", "decode", "mixture", "copies", "drafts", "padding", "empty requests", "nothing real")
HEADS = {"equal": (2, 2, 16, 16), "shared": (2, 6, 8, 12), "one": (1, 3, 5, 7), "odd": (3, 6, 12, 5)}


def draw(tokens: int, heads: tuple[int, int, int, int], channels: bool, dtype: torch.dtype = torch.float32) -> Any:
    """q, k, v, g, beta; the decay runs from next to none to almost all."""
    keys, values, key_dim, value_dim = heads
    q, k = torch.randn(2, tokens, keys, key_dim).to(dtype)
    v = torch.randn(tokens, values, value_dim).to(dtype)
    g = -5 * torch.rand(tokens, values, *([key_dim] if channels else ())) ** 4
    return q, k, v, g, torch.rand(tokens, values).to(dtype)


def theirs(parts: Any, state: Tensor, form: str = "recurrent") -> tuple[Tensor, Tensor]:
    """What transformers says of one request: outputs [tokens, heads, dim] and the state after them."""
    q, k, v, g, beta = (part[None] for part in parts)
    if g.dim() == 4:
        share = v.shape[2] // k.shape[2]
        q, k = q.repeat_interleave(share, 2), k.repeat_interleave(share, 2)
        op: Callable[..., Any] = getattr(glm, f"{form}_kimi_delta_attention")
    else:
        op = getattr(qwen, f"torch_{form}_gated_delta_rule")
    out, after = op(q, k, v, g, beta, initial_state=state[None], output_final_state=True, use_qk_l2norm_in_kernel=True)
    return out[0], after[0]


def ours(parts: Any, view: Any, batch: Any, key_dim: int, op: Callable[..., Tensor] = gated_delta_rule) -> Tensor:
    return op(*parts, view, batch, scale=key_dim**-0.5, norm_eps=1e-6)


@pytest.mark.parametrize("op", [gated_delta_rule, InPlaceDeltaRule()])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("heads", HEADS)
def test_is_that_of_transformers(slot_mixes: Any, name: str, heads: str, channels: bool, op: Any) -> None:
    mix, sizes = slot_mixes[name], HEADS[heads]
    parts = draw(mix.num_tokens, sizes, channels)
    for part in parts:
        part[mix.num_tokens - mix.padding :] = float("nan")
    states = torch.randn(len(mix.lens), *sizes[1:])
    states[list(mix.new)] = 0
    batch, view = mix.build(states)
    got = ours(parts, view, batch, sizes[2], op)

    def run(request: int, length: int) -> tuple[Tensor, Tensor]:
        start = mix.rows(request).start
        return theirs([part[start : start + length] for part in parts], states[request])

    for request, length in enumerate(mix.lens):
        if length:
            assert torch.allclose(got[mix.rows(request)], run(request, length)[0], rtol=0, atol=TOLERANCE)
    assert bool((got[mix.num_tokens - mix.padding :] == 0).all())
    mix.check(lambda request, length: run(request, length)[1], view, batch, TOLERANCE)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 200])
def test_chunked_and_recurrent_forms_agree(length: int, channels: bool) -> None:
    sizes = HEADS["shared"]
    parts = Tokens(*draw(length, sizes, channels)).prepared(sizes[2] ** -0.5, 1e-6)
    before = torch.randn(*sizes[1:])
    outs, state = [], before[None]
    for token in range(length):
        out, state = recurrent(parts.rows(slice(token, token + 1)), state)
        outs.append(out)
    together, after = chunked(parts, before)
    assert torch.allclose(together, torch.cat(outs), rtol=0, atol=TOLERANCE)
    assert torch.allclose(after, state[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("channels", [False, True])
def test_chunked_form_is_that_of_transformers(channels: bool) -> None:
    sizes = HEADS["equal"]
    parts, before = draw(150, sizes, channels), torch.randn(*HEADS["equal"][1:])
    got, after = chunked(Tokens(*parts).prepared(sizes[2] ** -0.5, 1e-6), before)
    want, state = theirs(parts, before, "chunk")
    assert torch.allclose(got, want, rtol=0, atol=TOLERANCE)
    assert torch.allclose(after, state, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("channels", [False, True])
def test_long_prompts_go_by_segments(slot_mix: Any, channels: bool) -> None:
    mix, sizes = slot_mix(lens=(1100,), new=(0,)), (1, 2, 4, 4)
    parts, states = draw(1100, sizes, channels), torch.zeros(1, *sizes[1:])
    batch, view = mix.build(states)
    want, after = theirs(parts, states[0])
    assert torch.allclose(ours(parts, view, batch, sizes[2]), want, rtol=0, atol=TOLERANCE)
    assert torch.allclose(view.data[batch.groups[0].write[0]], after, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("gate", [-200.0, 0.0])
def test_decays_of_nothing_and_of_everything(gate: float) -> None:
    """exp(-200 tokens) is 0 and its inverse infinite: no difference of logs may be taken apart."""
    for channels in (False, True):
        q, k, v, g, beta = draw(100, HEADS["equal"], channels)
        g = torch.full_like(g, gate)
        before = torch.randn(*HEADS["equal"][1:])
        got, after = chunked(Tokens(q, k, v, g, beta).prepared(0.25, 1e-6), before)
        want, state = theirs((q, k, v, g, beta), before)
        assert torch.allclose(got, want, rtol=0, atol=TOLERANCE)
        assert torch.allclose(after, state, rtol=0, atol=TOLERANCE)


def test_state_stays_float32(slot_mixes: Any) -> None:
    """Small corrections of many steps are lost in a bfloat16 state."""
    mix, sizes = slot_mixes["mixture"], HEADS["shared"]
    parts, states = draw(mix.num_tokens, sizes, False, torch.bfloat16), torch.randn(len(mix.lens), *sizes[1:])
    states[list(mix.new)] = 0
    batch, view = mix.build(states)
    got = ours(parts, view, batch, sizes[2])
    assert got.dtype == torch.bfloat16 and view.data.dtype == torch.float32
    run = partial(theirs, form="recurrent")
    mix.check(lambda r, n: run([part[mix.rows(r)] for part in parts], states[r])[1], view, batch, TOLERANCE)


def test_large_states_are_taken_in_place() -> None:
    def chosen(heads: int, deterministic: bool = False) -> str:
        shapes = {"value heads": heads, "key dim": 128, "value dim": 128}
        context = OpContext(device="cpu", dtype=torch.float32, shapes=shapes, deterministic=deterministic)
        return default_registry().select("gated_delta_rule", context).implementation.name

    assert (chosen(1), chosen(2), chosen(2, True)) == ("reference", "cpu_in_place", "cpu_token_by_token")


def test_scale_and_norm_are_arguments() -> None:
    q, k, v, g, beta = draw(5, HEADS["equal"], False)
    parts = Tokens(q, k, v, g, beta).prepared(0.5, None)
    assert torch.equal(parts.q, q * 0.5) and torch.equal(parts.k, k)
