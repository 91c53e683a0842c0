"""Says why a reference cannot be observed at test size, and which blocks are strange in its module tree alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from rtp_runtime.enable.findings import UnrecognisedError


def unusual_blocks(model: nn.Module, config: Any, cause: str) -> list[UnrecognisedError]:
    """The model itself with the cause, then the blocks of decoder layers that look like none of ours.

    Args:
        model: the reference on the meta device.
        cause: why it could not be observed.
    """
    found = []
    for name, module in _blocks(model):
        unusual = _unusual(module, config)
        if unusual is not None:
            reason, needs = unusual
            found.append(UnrecognisedError(f"{name} ({type(module).__name__})", f"{reason}.", needs))
    unknown = UnrecognisedError(
        type(model).__name__, f"it could not be run at test size ({cause}).", "a plugin by hand"
    )
    return [unknown, *found]


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of every layer in every list of layers, one of each class."""
    seen: set[str] = set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        for place, layer in enumerate(module):
            for child_name, child in layer.named_children():
                kind = f"{type(layer).__name__}.{child_name}.{type(child).__name__}"
                if kind not in seen:
                    seen.add(kind)
                    yield f"{name}.{place}.{child_name}", child


def _unusual(module: nn.Module, config: Any) -> tuple[str, str] | None:
    """Why a block looks like none of ours, and what it would need; None if it may be one.

    Mixers with a convolution and mixtures of experts are recognised by what they compute alone.
    """
    own = [name for name, parameter in module.named_parameters(recurse=False) if name not in ("weight", "bias")]
    if own and not any(isinstance(part, nn.Conv1d) for part in module.modules()):
        held = ", ".join(f"the parameter {name}" for name in own)
        return f"it holds {held}", "a component for it, and a state per request (SlotState) for what it carries along"
    linears = {name: part.out_features for name, part in module.named_children() if isinstance(part, nn.Linear)}
    if "ttention" in type(module).__name__ and linears and not _grouped(list(linears.values()), config):
        shown = ", ".join(f"{name} [{size}]" for name, size in linears.items())
        return (
            f"its projections are not q, k, v of whole heads: {shown}",
            "attention over these projections, and their state",
        )
    return None


def _grouped(sizes: list[int], config: Any) -> bool:
    heads = getattr(config, "num_attention_heads", 0)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    q, kv = heads * dim, kv_heads * dim
    return (q in sizes and kv in sizes) or (len(sizes) <= 2 and q + 2 * kv in sizes)
