"""Factors of queries that grow with their position (temperature scaling for long contexts)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import RELATIVE
from rtp_runtime.enable.recognise.view import View


def query_factor(view: View, name: str, factor: Tensor) -> str:
    """Code over `self.config` and `batch.positions` of a factor [tokens].

    Raises:
        UnrecognisedError: it is not 1 + b log(1 + floor(position / n)) for numbers b, n of the config.
    """
    positions = torch.arange(len(factor))
    keys = view.keys_of(view.module(name))
    numbers = sorted(_numbers(view.config), key=lambda number: not _is_length(number[0], keys))
    for (beta_code, beta), (length_code, length) in itertools.product(numbers, numbers):
        if not isinstance(beta, float) or not isinstance(length, int) or length < 2:
            continue
        for shift, places in ((0, "batch.positions"), (1, "(batch.positions + 1)")):
            found = 1 + beta * torch.log1p(torch.floor((positions + shift) / length))
            if float((found - factor).abs().max()) <= RELATIVE * float(factor.abs().max()):
                return f"1 + {beta_code} * torch.log1p(torch.floor({places} / {length_code}))"
    raise UnrecognisedError(
        view.label(name), "its queries are multiplied by an unknown function of their position.", "that function"
    )


def _is_length(code: str, keys: list[str]) -> bool:
    """Whether the key may count positions; others are last, since a width may be the same number by chance."""
    key = re.findall(r"\w+", code)[-1]
    return "position" in key or "floor" in key or (key in keys and "dim" not in key and "head" not in key)


def _numbers(config: Any) -> Iterator[tuple[str, float | int]]:
    for key, value in config.to_dict().items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield f"self.config.{key}", value
    for key, value in (getattr(config, "rope_parameters", None) or {}).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield f'self.config.rope_parameters["{key}"]', value
