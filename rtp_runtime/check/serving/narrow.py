"""The reference in the serving dtype, made of the float32 one by the rules with which transformers loads a dtype.

A copy, rather than a second load: what was cut, drawn or edited in memory stays so, and no file is read twice.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rtp_runtime.check.reference import Reference


def narrowed(reference: Reference, dtype: torch.dtype) -> Reference:
    """A copy of a float32 reference in `dtype`, as `from_pretrained(dtype=...)` makes it.

    Raises:
        RuntimeError, ValueError, TypeError: transformers cannot build this model in that dtype.
    """
    model = reference.model
    dtypes = narrow_dtypes(model, dtype)
    # deepcopy takes what the memo holds for a tensor's copy, so that no second float32 copy is ever made.
    memo: dict[int, Any] = {}
    for name, tensor in _tensors(model).items():
        narrow = tensor.detach().to(dtypes.get(name, tensor.dtype), copy=True)
        memo[id(tensor)] = nn.Parameter(narrow, requires_grad=False) if isinstance(tensor, nn.Parameter) else narrow
    twin = copy.deepcopy(model, memo)
    for config in {id(module.config): module.config for module in twin.modules() if hasattr(module, "config")}.values():
        config.dtype = dtype
    result = Reference(reference.path, twin.eval())
    result.use_names(reference.naming)
    return result


def narrow_dtypes(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of each parameter and buffer of `model` when it is loaded in `dtype`.

    Each has the dtype that its module gives it where `dtype` is the default, except those that the model keeps in
    float32 (`_keep_in_fp32_modules` in float16, `_keep_in_fp32_modules_strict` in bfloat16 too).
    """
    with torch.device("meta"):
        outline = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    plan = outline._get_dtype_plan(dtype)
    kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in plan)) if plan else None
    stored = set(outline.state_dict())
    found = {}
    for name, tensor in _tensors(outline).items():
        is_kept = kept is not None and name in stored and kept.search(name) is not None
        found[name] = torch.float32 if is_kept and tensor.is_floating_point() else tensor.dtype
    return found


@contextmanager
def rounded(reference: Reference, narrow: Reference, exact: frozenset[str] = frozenset()) -> Iterator[int]:
    """For the time of the block, the float32 reference holds the values of `narrow`; afterwards its own, bit for bit.

    `exact`: names, the reference's own, of tensors that stay as they are. Gives the number of tensors that changed.
    """
    theirs, stored = _tensors(narrow.model), set(reference.model.state_dict())
    saved: dict[str, tuple[Tensor, Tensor]] = {}
    try:
        for name, tensor in _tensors(reference.model).items():
            if name not in stored or name in exact or not tensor.is_floating_point():
                continue
            wide = theirs[name].to(tensor.dtype)
            if not torch.equal(wide, tensor):
                saved[name] = (tensor, tensor.detach().clone())
                _write(tensor, wide)
        yield len(saved)
    finally:
        for tensor, values in saved.values():
            _write(tensor, values)


def _write(tensor: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        tensor.data.copy_(values)


def _tensors(model: nn.Module) -> Mapping[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
