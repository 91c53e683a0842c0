"""One layer of the reference again, on a recorded input, with a mistake in it; all other layers give what they gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rtp_runtime.check.capture import Capture, ModuleRecorder
from rtp_runtime.check.causes import patching
from rtp_runtime.check.names import layer_of
from rtp_runtime.check.reference import Reference

Mistake = Callable[[], AbstractContextManager[Any]]
"""Makes the reference wrong for the time of the block."""


class _DoneError(Exception):
    """The layer has run; the rest of the forward is not needed."""


class Rerun:
    """Runs one layer (None: only what stands outside the layers) of the reference over one prompt."""

    def __init__(self, reference: Reference, ids: Sequence[int], layer: int | None) -> None:
        self._reference = reference
        self.ids = list(ids)
        self.layer = layer
        self._outputs: dict[str, Any] = {}
        self.base = self._record()

    def _record(self) -> Capture:
        """A full forward, in which every layer's output is kept as it is."""

        def keep(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                self._outputs[name] = output

            return hook

        reference = self._reference
        with ExitStack() as stack:
            for name in reference.layers:
                stack.callback(reference.modules[name].register_forward_hook(keep(name)).remove)
            return self._captured(reference, stack)

    def _captured(self, reference: Reference, stack: ExitStack) -> Capture:
        here = {name: m for name, m in reference.modules.items() if self._is_here(name, reference)}
        recorder = ModuleRecorder(here, dict(reference.layers), len(self.ids))
        capture = stack.enter_context(recorder.attached())
        with torch.inference_mode():
            _put_logits(capture, reference.logits(self.ids))
        return capture

    def _is_here(self, name: str, reference: Reference) -> bool:
        layer = layer_of(name, reference.layers)
        return layer is None or layer == self.layer or name in reference.layers

    def run(
        self, mistake: Mistake = nullcontext, late: Mistake = nullcontext, other: Reference | None = None
    ) -> Capture:
        """What the layer computes with a mistake. `late`: one that is nearer to the caller than what records.

        `other`: another copy of the model that is run instead; the layers around still give what the first gave.

        Raises:
            RuntimeError, ValueError, TypeError, IndexError and the like: the mistake does not fit.
        """
        reference = other or self._reference
        here = {name: m for name, m in reference.modules.items() if self._is_here(name, reference)}
        recorder = ModuleRecorder(here, dict(reference.layers), len(self.ids))
        with ExitStack() as stack:
            stack.enter_context(self._frozen(reference))
            stack.enter_context(mistake())
            capture = stack.enter_context(recorder.attached())
            stack.enter_context(late())
            stack.enter_context(self._stopping(reference))
            stack.enter_context(torch.inference_mode())
            with suppress(_DoneError):
                _put_logits(capture, reference.logits(self.ids))
        return capture

    @contextmanager
    def _frozen(self, reference: Reference) -> Iterator[None]:
        with ExitStack() as stack:
            for name, index in reference.layers.items():
                if index != self.layer:
                    stack.enter_context(patching.forward(reference.modules[name], _giving(self._outputs[name])))
            yield

    @contextmanager
    def _stopping(self, reference: Reference) -> Iterator[None]:
        def stop(*_: Any) -> None:
            raise _DoneError

        last = next((name for name, index in reference.layers.items() if index == self.layer), None)
        if last is None:
            yield
            return
        handle = reference.modules[last].register_forward_hook(stop)
        try:
            yield
        finally:
            handle.remove()


def _put_logits(capture: Capture, logits: Tensor) -> None:
    """The model's logits in the place of its head's output, which a scale or a cap may follow."""
    last = next((name for name in reversed(capture.order) if name in capture.calls), "")
    call = capture.calls.get(last)
    if call is not None and call.outputs and call.outputs[0].shape == logits.shape:
        capture.calls[last] = replace(call, outputs=(logits, *call.outputs[1:]))


def _giving(output: Any) -> Callable[..., Any]:
    return lambda *_, **__: output
