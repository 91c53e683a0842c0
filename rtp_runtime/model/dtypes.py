"""Which dtype a model runs in."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rtp_runtime.errors import UsageError

if TYPE_CHECKING:
    import torch

    from rtp_runtime.model.config import ModelConfig
    from rtp_runtime.weights.headers import Headers

RUNNABLE = ("float32", "bfloat16", "float16")

log = logging.getLogger(__name__)


def choose_dtype(dtype: str | torch.dtype, config: ModelConfig, headers: Headers, device: str) -> str:
    """The name of the dtype to run in; "auto" is the config's, or what most of the checkpoint's bytes are.

    float16 has no fast products on the CPU: there "auto" runs such a checkpoint in float32, which holds its values
    exactly, and asking for it by name is refused. Raises UsageError.
    """
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        name = config.declared_dtype() or _most_bytes(headers)
        if name == "float16" and device.startswith("cpu"):
            log.warning(
                'the checkpoint is float16, which is slow on the CPU; running in float32 (dtype="bfloat16" halves it)'
            )
            name = "float32"
    elif name == "float16" and device.startswith("cpu"):
        raise UsageError('dtype "float16" is for GPUs. On the CPU take "float32" or "bfloat16".')
    if name not in RUNNABLE:
        raise UsageError(f'dtype {name!r} cannot be run in. Give one of {", ".join(RUNNABLE)}, or "auto".')
    return name


def _most_bytes(headers: Headers) -> str:
    totals: dict[str, int] = {}
    for tensor in headers.tensors.values():
        totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.num_bytes
    floats = {name: count for name, count in totals.items() if name in RUNNABLE}
    return max(floats, key=floats.__getitem__, default="float32")
