"""Positions that follow from a formula, and the activation with parameters, against transformers'."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import XIELUActivation
from transformers.models.ctrl.modeling_ctrl import positional_encoding
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

from rtp_kernel.components import XIELU, SinusoidalEmbedding


def test_sinusoids_are_those_of_ctrl_and_xglm() -> None:
    positions = torch.tensor([0, 5, 1, 90])
    assert torch.allclose(
        SinusoidalEmbedding(16)(positions), positional_encoding(100, 16, torch.float32)[positions], atol=1e-5
    )
    table = XGLMSinusoidalPositionalEmbedding.get_embedding(100, 16)
    assert torch.allclose(SinusoidalEmbedding(16, shift=1)(positions), table[positions], atol=1e-5)
    with pytest.raises(ValueError, match="15 dimensions"):
        SinusoidalEmbedding(15)


def test_xielu_is_that_of_apertus() -> None:
    reference, ours = XIELUActivation(dtype=torch.float32), XIELU()
    ours.load_state_dict(reference.state_dict())
    x = torch.linspace(-6, 6, 101)
    with torch.no_grad():
        assert torch.allclose(ours(x), reference._xielu_python(x), atol=1e-6)
