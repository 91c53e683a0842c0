"""Which parameters and tables a forward really reads, seen at the operators: no name says whether one is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rtp_runtime.check.compare import tensors_of


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, names: dict[int, list[str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_of((args, kwargs or {})):
            self.seen.update(self._names.get(_storage(tensor), ()))
        return func(*args, **(kwargs or {}))


def used_tensors(model: nn.Module, run: Callable[[], object]) -> set[str]:
    """Names of the parameters and buffers of `model` whose memory any operator reads while `run` runs."""
    names: dict[int, list[str]] = {}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        if tensor.is_meta:
            continue  # has no memory to be seen at
        names.setdefault(_storage(tensor), []).append(name)
    with _Reads(names) as reads:
        run()
    seen: set[str] = reads.seen
    return seen


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
