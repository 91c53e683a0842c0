"""Tiny random checkpoints of any transformers decoder, made from its config alone.

python -m rtp_runtime.testing.checkpoints CONFIG DIRECTORY
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rtp_runtime.testing.shrink import shrink_config
from rtp_runtime.testing.tiny_models import randomise


def tiny_checkpoint(config: str | Path | Mapping[str, Any], directory: str | Path, seed: int = 0) -> Path:
    """Write a tiny float32 checkpoint of the model that `config` describes, with every parameter redrawn.

    Args:
        config: a config.json, a directory that holds one, or its contents.
        directory: where to; made if missing.

    Returns `directory`.

    Raises:
        ConfigError: a config that names no architecture, or one that transformers does not know.
    """
    import torch

    from rtp_runtime.model.config import ModelConfig, load_config

    known = ModelConfig(config) if isinstance(config, Mapping) else load_config(config)
    cls = transformers_class(known.architecture, known.hf)
    torch.manual_seed(seed)
    small = shrink_config(known.hf)
    small.dtype = torch.float32  # some modules hand it to torch as they find it
    model = cls(small).float().eval()
    randomise(model, seed)
    Path(directory).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    return Path(directory)


def transformers_class(architecture: str, config: Any) -> Any:
    """The model class of that name: of the package, or of the modeling module of the config's model type.

    Raises:
        ConfigError: transformers has no such class.
    """
    import importlib

    import transformers

    from rtp_runtime.errors import ConfigError

    found = getattr(transformers, architecture, None)
    if found is None and type(config).__module__.startswith("transformers."):
        home = type(config).__module__.replace(".configuration_", ".modeling_")
        found = getattr(importlib.import_module(home), architecture, None)
    if found is None:
        raise ConfigError(f"transformers {transformers.__version__} has no class {architecture!r}.")
    return found


def _main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description="Write a tiny random checkpoint of the model that a config describes.")
    parser.add_argument("config", type=Path, help="a config.json, or a directory that holds one")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tiny_checkpoint(arguments.config, arguments.directory, arguments.seed)


if __name__ == "__main__":
    _main()
