"""Activations against transformers'."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts

from rtp_kernel.ops.activation import ACTIVATIONS, activation, check_activation, gated_activation, slope


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "gelu_tanh"])
def test_names_mean_what_transformers_means(name: str) -> None:
    x = torch.linspace(-6, 6, 101)
    assert torch.allclose(activation(x, name), ACT2FN[name](x), atol=1e-6)
    assert torch.allclose(gated_activation(x, x.flip(0), name), ACT2FN[name](x) * x.flip(0), atol=1e-5)


def test_gelu_tanh_is_an_alias() -> None:
    x = torch.linspace(-6, 6, 101)
    assert torch.equal(activation(x, "gelu_tanh"), ACT2FN["gelu_pytorch_tanh"](x))


def test_unknown_name_is_refused_with_the_known() -> None:
    with pytest.raises(ValueError, match='activation "prelu" is unknown; known: silu'):
        check_activation("prelu")


def _gate(experts: type[torch.nn.Module], gate_up: torch.Tensor, **attributes: object) -> torch.Tensor:
    module = experts.__new__(experts)
    torch.nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    result: torch.Tensor = module._apply_gate(gate_up)
    return result


def test_clamped_form_is_that_of_deepseek_v4() -> None:
    gate_up = torch.randn(50, 32) * 10
    want = _gate(DeepseekV4Experts, gate_up, limit=7.0, act_fn=ACT2FN["silu"])
    gate, up = gate_up.chunk(2, -1)
    assert torch.equal(gated_activation(gate, up, "silu", 7.0), want)


@pytest.mark.parametrize("alpha", [1.702, 0.9])
def test_oai_form_is_that_of_minimax_m3(alpha: float) -> None:
    gate_up = torch.randn(50, 32) * 10
    gate, up = gate_up.chunk(2, -1)
    want = _gate(MiniMaxM3VLExperts, gate_up, swiglu_limit=7.0, swiglu_alpha=alpha)
    assert torch.allclose(gated_activation(gate, up, "swiglu_oai", 7.0, **slope("swiglu_oai", alpha)), want, atol=1e-5)
    assert alpha != 1.702 or torch.allclose(gated_activation(gate, up, "swiglu_oai", 7.0), want, atol=1e-5)
