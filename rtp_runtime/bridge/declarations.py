"""The weights and states of a bridged block, read off the block itself on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rtp_runtime.errors import UnsupportedModelError
from rtp_runtime.state import PagedState, SlotState, StateDescriptor, WindowState
from rtp_runtime.weights import Axis, Concat, FromCheckpoint, Source, Stack, Weight

if TYPE_CHECKING:
    from torch import Tensor

NUM_TOKENS = 4
"""Of the run on the meta device."""
Parts = Mapping[str, Sequence[str]]
"""Name of a parameter in the block -> names of the equal parts that checkpoints hold in its place, joined along their
rows; names with `{expert}` are of each expert, and are stacked besides."""


def bridged_weights(
    target: str,
    config: Any,
    *args: Any,
    prefix: str,
    over: Mapping[str, Sequence[int]] | None = None,
    renames: Mapping[str, str] | None = None,
    parts: Parts | None = None,
    hub: str | None = None,
) -> tuple[Weight, ...]:
    """A descriptor for each parameter and stored buffer of the block, which is made as `target(config, *args)`.

    Args:
        prefix: the block's place, with the dot at its end, e.g. "model.layers.{layer}.mlp.".
        over: which `{layer}` there are, as in `Weight`.
        renames: names in the block that checkpoints call otherwise.
        parts: parameters that checkpoints hold in parts.
        hub: the block's place in checkpoints, where that is not `prefix`.

    Raises:
        UnsupportedModelError: the target is no block of the installed transformers.
    """
    tensors = _block(target, config, *args).state_dict()
    return tuple(
        Weight(
            parameter=prefix + name,
            source=_source(hub or prefix, (renames or {}).get(name, name), tensor, (parts or {}).get(name, ())),
            over=over or {},
            dtype=_dtype(tensor),
        )
        for name, tensor in tensors.items()
    )


def bridged_states(
    target: str, config: Any, layer: int = 0, *, rotary: str | None = None, window: int | None = None
) -> Mapping[str, StateDescriptor]:
    """The states of a bridged attention or recurrence, as its first run of a new request makes them.

    `rotary`: the target of the model's rotary tables, if the block takes them.

    Raises:
        UnsupportedModelError: the target is no such block, or keeps state that goes through no cache.
    """
    from rtp_runtime.bridge.cache import INDEX

    listener = _listen(target, config, layer, rotary)
    states: dict[str, StateDescriptor] = {}
    for name, tensor in listener.paged.items():
        heads, dim = tensor.shape[1], tensor.shape[-1]
        axes = {"heads": heads, "index dim": dim} if name == INDEX else {"kv heads": heads, "head dim": dim}
        states[name] = PagedState(axes=axes) if window is None else WindowState(axes=axes, window=window)
    for name, tensor in listener.slots.items():
        axes = {f"axis {place}": size for place, size in enumerate(tensor.shape[1:])}
        states[name] = SlotState(axes=axes, dtype="cache" if _dtype(tensor) == "model" else _dtype(tensor))
    if not states:
        raise UnsupportedModelError(f"a bridge to {target}: it gives nothing to a cache, so it is no block with state.")
    return states


def _listen(target: str, config: Any, layer: int, rotary: str | None) -> Any:
    """The block's first run of a new request, of which a listener hears what goes to the cache.

    A recurrence takes a mask for padding in the place where attention takes its own, so it is also tried without. A
    block whose steps depend on values, as those of a router do, runs over real ones, whatever they are.
    """
    import torch

    error: Exception | None = None
    for device, masked in (("meta", True), ("meta", False), ("cpu", True), ("cpu", False)):
        if device == "cpu" and not isinstance(error, NotImplementedError):
            break
        try:
            with _narrow(device), torch.no_grad():
                return _run_once(_block(target, config, layer, device=device), config, rotary, masked)
        except UnsupportedModelError:
            raise
        except Exception as raised:  # code of a block that nobody here has seen
            error = error or raised
    raise UnsupportedModelError(
        f"a bridge to {target}: it cannot be run alone ({type(error).__name__}: {error}). Write it by hand."
    ) from error


def _run_once(block: Any, config: Any, rotary: str | None, masked: bool) -> Any:
    import torch

    from rtp_runtime.bridge.cache import Listener
    from rtp_runtime.bridge.modules import CACHES, argument_names

    listener, places = Listener(), torch.arange(NUM_TOKENS)[None]
    x = torch.zeros(1, NUM_TOKENS, config.hidden_size)
    arguments: dict[str, Any] = dict.fromkeys(CACHES, listener)
    arguments |= {"position_ids": places, "cache_position": places[0], "use_cache": True}
    if masked:
        arguments["attention_mask"] = torch.zeros(1, 1, NUM_TOKENS, NUM_TOKENS)
    if rotary is not None:
        arguments["position_embeddings"] = _block(rotary, config, device=x.device.type).forward(x, places)
    names = argument_names(block)
    block.forward(x, **{name: value for name, value in arguments.items() if name in names})
    return listener


def _block(target: str, config: Any, *args: Any, device: str = "meta") -> Any:
    from rtp_runtime.bridge.target import Target

    with _narrow(device):
        return Target.parse(target).build(config, *args)


@contextmanager
def _narrow(device: str) -> Iterator[None]:
    """The device, and a narrow dtype, under which what is pinned in float32 shows."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def _dtype(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return "model" if name == "bfloat16" else name


def _source(prefix: str, name: str, tensor: Tensor, parts: Sequence[str]) -> Source:
    shape = tuple(tensor.shape)
    if not parts:
        return FromCheckpoint(prefix + name, shape)
    stacked = "{expert}" in parts[0]
    count, rows, *rest = shape if stacked else (1, *shape)
    tensors = tuple(FromCheckpoint(prefix + part, (rows // len(parts), *rest)) for part in parts)
    joined = Concat(tensors) if len(tensors) > 1 else tensors[0]
    return Stack(joined, "expert", Axis("experts", count)) if stacked else joined
