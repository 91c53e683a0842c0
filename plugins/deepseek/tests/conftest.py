"""The other forms in which checkpoints of this family exist, made of tiny ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary numbers as the hub's files hold them: theta at the top, the rest in `rope_scaling`."""
    numbers = config.pop("rope_parameters")
    theta, kind = numbers.pop("rope_theta"), numbers.pop("rope_type")
    return config | {"rope_theta": theta, "rope_scaling": None if kind == "default" else {"type": kind, **numbers}}


@pytest.fixture
def write_as_on_the_hub() -> Callable[..., None]:
    """Changes a checkpoint in place: a flat config with `more` in it, and a prediction layer behind the last one."""

    def write(directory: Path, **more: Any) -> None:
        file = directory / "config.json"
        config = flat(json.loads(file.read_text())) | more
        file.write_text(json.dumps(config))
        tensors = load_file(directory / "model.safetensors")
        layers = config["num_hidden_layers"]
        last, extra = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
        block = {name.replace(last, extra): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
        size = config["hidden_size"]
        own = {extra + "enorm.weight": torch.ones(size), extra + "eh_proj.weight": torch.ones(size, 2 * size)}
        head = {extra + "shared_head.head.weight": torch.ones(config["vocab_size"], size)}
        save_file(tensors | block | own | head, directory / "model.safetensors", metadata={"format": "pt"})

    return write


@pytest.fixture
def write_stacked() -> Callable[[Any, Path], None]:
    """Writes a transformers model with the tensors that it holds in memory: experts stacked, gate before up."""

    def write(model: Any, directory: Path) -> None:
        directory.mkdir()
        model.config.save_pretrained(directory)
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        assert any(name.endswith("experts.gate_up_proj") for name in tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return write
