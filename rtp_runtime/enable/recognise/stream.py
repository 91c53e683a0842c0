"""In which dtype the reference adds up its residual stream, which float32 values cannot show."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from rtp_runtime.enable.recognise.view import View
from rtp_runtime.enable.recording import tensors

NUM_TOKENS = 4


@torch.no_grad()
def keeps_wide_stream(view: View, layer: str) -> bool:
    """Whether the decoder layer `layer` of a bfloat16 reference still gives float32 (`residual_in_fp32` of Mamba)."""
    narrow: Any = copy.deepcopy(view.reference.model).bfloat16()
    found: list[torch.dtype] = []

    def listen(module: Any, args: Any, output: Any) -> None:
        first: Tensor | None = next(tensors(output), None)
        if first is not None:
            found.append(first.dtype)

    narrow.get_submodule(layer).register_forward_hook(listen)
    try:
        narrow(input_ids=view.recording.ids[:, :NUM_TOKENS], use_cache=False)
    except (RuntimeError, TypeError):  # a reference that runs in float32 alone
        return False
    return found == [torch.float32]
