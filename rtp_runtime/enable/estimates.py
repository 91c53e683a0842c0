"""What serving a checkpoint would take, from its config alone: memory of weights and state, work per token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from rtp_runtime.state.descriptors import SlotState, StateDescriptors, WindowState
from rtp_runtime.weights.dtypes import BITS

DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
CACHE_DTYPE = "bfloat16"
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
    "moe_k",
    "num_selected_experts",
)


@dataclass(frozen=True)
class StateEstimate:
    """Bytes of a request's state, in bfloat16 where the model does not say otherwise."""

    per_token: int
    """What every further token adds."""
    per_request: int
    """What does not grow: recurrent states, and windows once they are full."""


@dataclass(frozen=True)
class Estimates:
    """Numbers of the full model; nothing of it was built."""

    parameters: int
    active_parameters: int
    """Those that one token meets: of routed experts only as many as are chosen."""
    weight_bytes: Mapping[str, int]
    """dtype -> bytes of all weights."""
    flops_per_token: int
    """Of products with weights; attention adds to it with the length of the context."""
    state: StateEstimate | None = None
    """None while nothing is known of its state."""


def estimate(model: nn.Module, config: Any, states: StateDescriptors | None = None) -> Estimates:
    """From the reference on the meta device, and the state descriptors of the plugin that would serve it."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total = sum(sizes.values())
    idle = sum(math.ceil(size * (1 - _share(model, config, name))) for name, size in sizes.items())
    tables = [part.weight for part in model.modules() if isinstance(part, nn.Embedding)]
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    tied = head is not None and any(table is head.weight for table in tables)
    multiplied = total - idle - sum(table.numel() for table in tables) + (head.weight.numel() if tied else 0)
    return Estimates(
        parameters=total,
        active_parameters=total - idle,
        weight_bytes={dtype: total * BITS[dtype] // 8 for dtype in DTYPES},
        flops_per_token=2 * max(multiplied, 0),
        state=None if states is None else estimate_state(states),
    )


def _share(model: nn.Module, config: Any, name: str) -> float:
    """The part of a parameter that one token meets: 1 but for tensors of all routed experts."""
    parameter = model.get_parameter(name)
    if parameter.ndim < 3 and not ("expert" in name and parameter.ndim == 2 and "experts." in name):
        return 1.0
    chosen = next((value for key in EXPERTS_PER_TOKEN if isinstance(value := getattr(config, key, None), int)), None)
    if chosen is None or "expert" not in name:
        return 1.0
    if parameter.ndim == 3:
        return min(1.0, chosen / parameter.shape[0])
    path = name.split("experts.")[0] + "experts"
    experts = model.get_submodule(path)
    return min(1.0, chosen / len(experts)) if isinstance(experts, nn.ModuleList) else 1.0


def estimate_state(states: StateDescriptors) -> StateEstimate:
    """Bytes per token and per request of what every layer keeps."""
    per_token = per_request = 0.0
    for _, _, state in states.named():
        dtype = CACHE_DTYPE if state.dtype == "cache" else state.dtype
        size = math.prod(state.axes.values()) * BITS[dtype] / 8
        if isinstance(state, SlotState):
            per_request += size
        elif isinstance(state, WindowState):
            per_request += size * state.window
        else:
            per_token += size / getattr(state, "tokens_per_entry", 1)
    return StateEstimate(math.ceil(per_token), math.ceil(per_request))
