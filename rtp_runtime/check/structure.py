"""What the two module trees have in common: kinds of layers, modules that only one side has, how windows compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from rtp_runtime.check.capture import Capture, holds_something
from rtp_runtime.check.names import holds_layers, relative_name


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that consist of the same modules and see as far."""

    modules: tuple[str, ...]
    """Relative names of the modules with parameters that run in such a layer."""
    sees: str
    """How far a token sees, in words."""
    window: int | None
    layers: tuple[int, ...]

    def describe(self, common: set[str]) -> str:
        """Attention and the modules that set it apart; `common`: those that every kind has."""
        sees = self.sees
        own = [name for name in self.modules if name not in common]
        return f"{sees} ({', '.join(own[:3])}{', …' if len(own) > 3 else ''})" if own else sees


def layer_kinds(modules: Mapping[str, nn.Module], capture: Capture, layers: Mapping[str, int]) -> list[LayerKind]:
    """The kinds of layers of the reference, in order of their first layer."""
    called = parametered(modules, capture.calls)
    kinds: dict[tuple[tuple[str, ...], str, int | None], list[int]] = {}
    for layer, index in layers.items():
        names = tuple(relative_name(name, layers) for name in called if name.startswith(f"{layer}."))
        kinds.setdefault((names, *layer_sight(capture, layer)), []).append(index)
    return [LayerKind(names, sees, window, tuple(indices)) for (names, sees, window), indices in kinds.items()]


def layer_sight(capture: Capture, layer: str) -> tuple[str, int | None]:
    """How a token of this layer saw others in the capture, in words, and the window, if that is what it was."""
    calls = [call for name, call in capture.attention.items() if name == layer or name.startswith(f"{layer}.")]
    if not calls:
        return "recurrent, no attention", None
    window, visible = calls[0].window, calls[0].visible
    sees = "full attention" if window is None else f"window {window}"
    if visible is None:
        return sees, window
    compressed = visible.shape[-1] - visible.shape[0]
    if not compressed:
        return "selected tokens", None
    some = int(visible[-1, 0, visible.shape[0] :].sum()) < compressed
    return f"{sees} and {'selected' if some else 'all'} compressed entries", window


def parametered(modules: Mapping[str, nn.Module], called: Iterable[str]) -> list[str]:
    """Called modules that hold parameters or tables, themselves or below, in the order given."""
    return [name for name in called if holds_something(modules[name])]


def without_counterpart(
    modules: Mapping[str, nn.Module], called: Iterable[str], layers: Mapping[str, int], judged: set[str]
) -> list[str]:
    """The reference's layers and modules with parameters that nothing of ours answered to, in execution order."""
    names = [name for name in parametered(modules, called) if name not in judged and not holds_layers(name, layers)]
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names if other in layers)]


def extra_modules(ours: nn.Module, reference: set[str], fused: set[str]) -> list[str]:
    """Our modules with parameters of their own that the reference lacks, by our dotted names."""
    return [
        name
        for name, module in ours.named_modules()
        if name and name not in reference and name not in fused and any(True for _ in module.parameters(recurse=False))
    ]
