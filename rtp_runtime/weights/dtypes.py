"""Names of dtypes: safetensors' codes, the names descriptors use, torch's objects, and which casts lose nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CODES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""safetensors' code -> the name that descriptors and torch use."""

BITS = {
    **dict.fromkeys(("float64", "int64", "uint64"), 64),
    **dict.fromkeys(("float32", "int32", "uint32"), 32),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 16),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), 8),
}

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""Floats that hold plain values; the 8-bit ones only mean something with their scales."""

_EXACT = {
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
    "int8": ("int16", "int32", "int64"),
    "int16": ("int32", "int64"),
    "int32": ("int64",),
    "uint8": ("int16", "int32", "int64"),
}


def code(name: str) -> str:
    """safetensors' code of a dtype name."""
    return next(key for key, value in CODES.items() if value == name)


def keeps_values(source: str, target: str) -> bool:
    """Whether a cast from `source` to `target` loses nothing."""
    return source == target or target in _EXACT.get(source, ())


def may_load(source: str, target: str) -> bool:
    """Whether a tensor stored as `source` may become `target`: exact casts, and any between plain floats."""
    return keeps_values(source, target) or (source in FLOATS and target in FLOATS)


def promote(names: Iterable[str]) -> str:
    """The smallest dtype that holds the values of all of these (float32 for float16 with bfloat16)."""
    merged = ""
    for name in names:
        if not merged or keeps_values(merged, name):
            merged = name
        elif not keeps_values(name, merged):
            common = [wide for wide in _EXACT.get(merged, ()) if keeps_values(name, wide)]
            merged = common[0] if common else "float64"
    return merged


def torch_dtype(name: str) -> torch.dtype:
    """torch's object of a dtype name."""
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name of torch's object, e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")
