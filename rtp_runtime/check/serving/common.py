"""Which of our modules stand for one of the reference's and can be given its input: found by a short run of both.

Where all three runs are given the same, a module's rounding is seen apart from what its inputs carried already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from rtp_runtime.check.capture import Capture
from rtp_runtime.check.names import layer_of, relative_name
from rtp_runtime.check.ours import OurModel
from rtp_runtime.check.probes import boundaries, value_of
from rtp_runtime.check.reference import Reference
from rtp_runtime.check.splits import FusedOutputs

SAME = 0.2
"""Inputs that are further apart than this, relatively, are not the same quantity."""
NUM_TOKENS = 12


def find_common(exact: Reference, ours: OurModel, fused: FusedOutputs, head: str | None) -> dict[str, str]:
    """Our module -> the reference's module whose input it is given."""
    ids = [(5 * place + 3) % exact.vocab_size for place in range(NUM_TOKENS)]
    fed: dict[str, Tensor] = {}
    with _first_inputs(exact, fed):
        _, capture = exact.capture(ids)
    fixed = {name: name for name in boundaries(capture, exact.layers) if name != head}
    finder = _Finder(capture, exact, fused, fed, fixed)
    with finder.attached(ours.module):
        ours.run({"short": ids}, 1, keep_logits=False)
    return {**fixed, **finder.found}


def _first_inputs(reference: Reference, fed: dict[str, Tensor]) -> ExitStack:
    """Keep the first tensor that each module is given."""

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            first = next((item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)), None)
            if first is not None:
                fed.setdefault(name, first)

        return keep

    stack = ExitStack()
    for name, module in reference.modules.items():
        stack.callback(module.register_forward_pre_hook(hook(name), with_kwargs=True).remove)
    return stack


class _Finder:
    """Hears what our modules are given in a short run whose layers are given the reference's input."""

    def __init__(
        self,
        capture: Capture,
        reference: Reference,
        fused: FusedOutputs,
        fed: dict[str, Tensor],
        fixed: dict[str, str],
    ) -> None:
        self._capture, self._reference, self._fused, self._fed, self._fixed = capture, reference, fused, fed, fixed
        self.found: dict[str, str] = {}

    def attached(self, module: nn.Module) -> ExitStack:
        stack = ExitStack()
        for name, child in module.named_modules():
            if name in self._fixed:
                stack.callback(child.register_forward_pre_hook(self._graft(name)).remove)
            sources = list(self._sources(name))
            if sources:
                stack.callback(child.register_forward_pre_hook(self._note(name, sources)).remove)
        return stack

    def _sources(self, name: str) -> Iterator[str]:
        """The reference's modules for which ours stands, if they can be given something."""
        names = self._fused.parts(name) or (name,)
        if all(self._can_be_given(part) for part in names):
            yield from names

    def _can_be_given(self, name: str) -> bool:
        capture, layers = self._capture, self._reference.layers
        if name not in capture.calls or name in capture.repeated or name in layers or name not in self._fed:
            return False
        call, inside = capture.calls[name], relative_name(name, layers)
        # What mixing, a gate or an activation gives a module is compared at that module, and so must stay.
        if layer_of(name, layers) is None or ("." in inside and name in capture.computed) or not call.inputs:
            return False
        first = self._fed[name]
        return first.is_floating_point() and first.numel() == call.inputs[0].numel()

    def _graft(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> Any:
            wanted = self._capture.calls[name].inputs[0]
            hidden = value_of(args[0]) if args else None
            if hidden is None or hidden.shape != wanted.shape:
                return None
            return (wanted.to(hidden), *args[1:])

        return hook

    def _note(self, name: str, sources: list[str]) -> Callable[..., None]:
        wanted = [self._capture.calls[source].inputs[0] for source in sources]

        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor) and all(_same(args[0], tensor) for tensor in wanted):
                self.found.setdefault(name, sources[0])

        return hook


def _same(ours: Tensor, wanted: Tensor) -> bool:
    if ours.shape != wanted.shape or not ours.is_floating_point():
        return False
    apart = torch.linalg.vector_norm(ours.float() - wanted.float())
    return bool(apart <= SAME * torch.linalg.vector_norm(wanted.float()))
