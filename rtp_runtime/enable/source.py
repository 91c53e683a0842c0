"""What MODEL names: a directory, a hub id or a bare config. Weights are never downloaded here."""

from __future__ import annotations

from pathlib import Path

from rtp_runtime.model.checkpoint import resolve_checkpoint
from rtp_runtime.model.config import ModelConfig, load_config


def find_config(model: str, *, trust_remote_code: bool = False) -> tuple[ModelConfig, Path | None]:
    """The config, and the directory with the weights' headers when it holds any.

    Raises:
        ModelError: nothing of that name, or a config that cannot be used.
    """
    path = Path(model).expanduser()
    if path.is_file():
        return load_config(path, trust_remote_code=trust_remote_code), None
    patterns = ("config.json", "*.py") if trust_remote_code else ("config.json",)
    folder = path if path.is_dir() else resolve_checkpoint(model, patterns=patterns)
    config = load_config(folder, trust_remote_code=trust_remote_code)
    return config, folder if any(folder.glob("*.safetensors")) else None
