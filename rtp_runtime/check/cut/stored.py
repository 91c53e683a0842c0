"""What a checkpoint of a model holds: transformers' own way back from its parameters to the tensors of a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from rtp_runtime.errors import NotJudgedError

LARGE = 64 << 20
"""Elements from which a parameter outside the layers is handled alone."""


def held(model: Any) -> dict[str, Tensor]:
    """The parameters, tied ones once, and the buffers that a checkpoint holds."""
    stored = model.state_dict()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in named.items() if name in stored}


def groups(names: Sequence[str], layers: Sequence[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Names that are converted together: of a decoder layer, of a large tensor alone, of all the rest."""
    left = list(names)
    for layer in layers:
        group = [name for name in left if name.startswith(f"{layer}.")]
        left = [name for name in left if name not in group]
        yield group
    for name in left:
        if sizes[name] >= LARGE:
            yield [name]
    yield [name for name in left if sizes[name] < LARGE]


def as_stored(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters by their names in a checkpoint, split and stacked as there.

    Raises:
        NotJudgedError: this transformers' way back is not known.
    """
    import transformers

    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise NotJudgedError(
            f"transformers {transformers.__version__} saves weights otherwise than its version 5.24, so no cut "
            "checkpoint can be written: install that version"
        ) from error
    stored: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return stored


def stored_shapes(model: Any, layers: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a checkpoint of `model`, which may be on the meta device."""
    tensors = {name: tensor.to("meta") for name, tensor in held(model).items()}
    sizes = {name: tensor.numel() for name, tensor in tensors.items()}
    found: dict[str, tuple[int, ...]] = {}
    for group in groups(list(tensors), layers, sizes):
        part = as_stored(model, {name: tensors[name] for name in group})
        found |= {name: tuple(tensor.shape) for name, tensor in part.items()}
    return found
