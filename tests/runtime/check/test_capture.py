"""What a capture keeps of modules whose tensors are not laid out token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rtp_runtime.check.capture import ModuleRecorder

TOKENS, CHANNELS = 11, 6


class Mixer(nn.Module):
    """A causal convolution that pads its input before the call, or lets the convolution pad both ends."""

    def __init__(self, padded_outside: bool) -> None:
        super().__init__()
        self.outside = padded_outside
        self.conv1d = nn.Conv1d(CHANNELS, CHANNELS, 3, dilation=2, groups=CHANNELS, padding=0 if padded_outside else 4)

    def forward(self, hidden: Tensor) -> Tensor:
        channels = hidden.transpose(1, 2)
        mixed: Tensor = self.conv1d(functional.pad(channels, (4, 0)) if self.outside else channels)
        return mixed[..., :TOKENS].transpose(1, 2)


@pytest.mark.parametrize("padded_outside", [True, False])
def test_a_convolution_is_kept_token_by_token(padded_outside: bool) -> None:
    mixer, hidden = Mixer(padded_outside), torch.randn(1, TOKENS, CHANNELS)
    recorder = ModuleRecorder(dict(mixer.named_modules()), {}, TOKENS)
    with recorder.attached() as capture:
        out = mixer(hidden)
    call = capture.calls["conv1d"]
    assert torch.equal(call.inputs[0], hidden[0]) and torch.equal(call.outputs[0], out[0])
