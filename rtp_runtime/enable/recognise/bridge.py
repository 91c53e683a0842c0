"""The last resort for a block: the reference's own module, if it can stand alone and keeps its state in a cache."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from rtp_runtime.bridge.declarations import bridged_states
from rtp_runtime.bridge.modules import TABLES, argument_names
from rtp_runtime.bridge.target import HOME, Target
from rtp_runtime.enable.blocks.bridge import Bridge, BridgedMixing
from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import express
from rtp_runtime.enable.recognise.view import View
from rtp_runtime.errors import UnsupportedModelError


def is_bridgeable(view: View, name: str) -> bool:
    """Whether it is a block of transformers, with parameters."""
    module = view.module(name)
    if not type(module).__module__.startswith(HOME) or not list(module.parameters()):
        return False
    try:
        _target(module).block()
    except UnsupportedModelError:
        return False
    return True


def recognise_bridge(view: View, name: str) -> Bridge:
    """The reference's module itself.

    Raises:
        UnrecognisedError: it cannot stand alone.
    """
    module, target = view.module(name), str(_target(view.module(name)))
    try:
        if _asks_for_a_cache(module):
            return _mixing(view, name, target)
        return _stateless(view, name, target)
    except UnsupportedModelError as error:
        raise UnrecognisedError(view.label(name), f"it cannot be bridged either: {error}", "a block by hand") from error


def _target(module: nn.Module) -> Target:
    return Target(type(module).__module__, type(module).__name__)


def _asks_for_a_cache(module: nn.Module) -> bool:
    from rtp_runtime.bridge.modules import CACHES

    return bool(set(CACHES) & set(inspect.signature(type(module).forward).parameters))


def _mixing(view: View, name: str, target: str) -> BridgedMixing:
    module = view.module(name)
    _check_made_of(view, name, target, 0)
    rotary = _rotary(view, module) if TABLES in argument_names(module) else None
    states = bridged_states(target, view.config, rotary=rotary)
    return BridgedMixing(
        class_name=type(module).__name__,
        target=target,
        reads=_reads(view, module),
        wants_layer=True,
        names=tuple(states),
        **_stored(view, name),
        rotary=rotary,
        **(_window(view, name) if "key" in states else {}),
    )


def _stateless(view: View, name: str, target: str) -> Bridge:
    module, call = view.module(name), view.recording.of(name)
    if len(call.inputs) != 1:
        raise UnrecognisedError(
            view.label(name), f"it is given {len(call.inputs)} tensors and keeps no state.", "a block by hand"
        )
    wants_layer = not _is_made_of(view, module, target)
    if wants_layer:
        _check_made_of(view, name, target, 0)
    return Bridge(
        class_name=type(module).__name__,
        target=target,
        reads=_reads(view, module),
        wants_layer=wants_layer,
        **_stored(view, name),
    )


def _is_made_of(view: View, module: nn.Module, target: str, *args: Any) -> bool:
    """Whether `target(config, *args)` has this module's tensors."""
    try:
        with torch.device("meta"):
            built = Target.parse(target).build(view.config, *args)
    except UnsupportedModelError:
        return False
    return _shapes(built) == _shapes(module)


def _check_made_of(view: View, name: str, target: str, *args: Any) -> None:
    if not _is_made_of(view, view.module(name), target, *args):
        raise UnrecognisedError(
            view.label(name), "it cannot be bridged: it is not made of the config and a layer.", "a block by hand"
        )


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _rotary(view: View, module: nn.Module) -> str:
    if not view.tables:
        raise UnrecognisedError(
            type(module).__name__, "it takes rotary tables, and none were found in the model.", "tables by hand"
        )
    return str(_target(view.module(view.tables[0].module)))


def _window(view: View, name: str) -> dict[str, Any]:
    """`window` and `chunked` of the mask that the block was given; none when every token saw all before it."""
    tokens = view.recording.ids.shape[1]
    masks = [t for t in view.recording.of(name).inputs if t.ndim == 4 and t.shape[-2:] == (tokens, tokens)]
    if not masks:
        return {}
    seen = (masks[0] if masks[0].dtype == torch.bool else masks[0] == 0)[0, 0]
    place = torch.arange(tokens)
    distance = place[:, None] - place
    causal = distance >= 0
    window = int(seen[:, 0].sum())  # how many tokens saw the first one
    if torch.equal(seen, causal & (distance < window)):
        chunked = False
    elif torch.equal(seen, causal & (place[:, None] // window == place // window)):
        chunked = True
    else:
        raise UnrecognisedError(
            view.label(name), "its mask is neither causal nor a causal window or chunk.", "a block by hand"
        )
    if window >= tokens:
        return {}
    found = express(
        window, view.config, [*view.reference.reads, "sliding_window", "attention_chunk_size"], "window|chunk"
    )
    if found is None:
        raise UnrecognisedError(view.label(name), f"its window of {window} follows from no config key.", "that rule")
    return {"window": found.code, "chunked": chunked}


def _reads(view: View, module: nn.Module) -> frozenset[str]:
    return frozenset(key for part in module.modules() for key in view.keys_of(part))


MOST_PARTS = 4


def _stored(view: View, name: str) -> dict[str, Any]:
    """How checkpoints hold the block's tensors, where not under its own names.

    Raises:
        UnrecognisedError: they hold them in another form.
    """
    layer, _, own = name.rpartition(".")
    found: dict[str, tuple[str, ...]] = {}
    for inside, tensor in view.module(name).state_dict().items():
        stored = f"{name}.{inside}" if f"{name}.{inside}" in view.hub.names else view.hub.name_of(tensor)
        parts = (stored,) if stored is not None else _parts(view, tensor)
        if parts is None or not all(part.startswith(f"{layer}.") for part in parts):
            raise UnrecognisedError(
                view.label(name), f"checkpoints hold {name}.{inside} in another form.", "weight descriptors by hand"
            )
        found[inside] = tuple(part.removeprefix(f"{layer}.") for part in parts)
    places = {part.partition(".")[0] for parts in found.values() for part in parts}
    if len(places) != 1:
        raise UnrecognisedError(
            view.label(name), f"checkpoints hold it in {', '.join(sorted(places))}.", "weight descriptors by hand"
        )
    hub = places.pop()
    there = {inside: tuple(part.removeprefix(f"{hub}.") for part in parts) for inside, parts in found.items()}
    plain = {inside: parts[0] for inside, parts in there.items() if len(parts) == 1 and "{expert}" not in parts[0]}
    return {
        "renames": tuple((inside, other) for inside, other in plain.items() if inside != other),
        "parts": tuple((inside, parts) for inside, parts in there.items() if inside not in plain),
        "hub": hub if hub != own else None,
    }


def _parts(view: View, tensor: torch.Tensor) -> tuple[str, ...] | None:
    """The tensors that a parameter is made of: equal runs of its rows, or, of all experts, of each expert's."""
    for count in range(1, MOST_PARTS + 1):
        if tensor.ndim == 3:
            patterns = [view.hub.pattern_of(list(part)) for part in tensor.chunk(count, dim=1)]
            if all(patterns):
                return tuple(str(pattern) for pattern in patterns)
        names = [view.hub.name_of(part) for part in tensor.chunk(count)] if tensor.ndim else []
        if names and all(names):
            return tuple(str(name) for name in names)
    return None
