"""From what a user names (a directory, or an id on the hub) to a directory with a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rtp_runtime.errors import ModelError

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt")
"""What is downloaded, from the top folder: no pickles, no code."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def resolve_checkpoint(model: str | Path, patterns: Sequence[str] = PATTERNS) -> Path:
    """The directory of `model`, downloaded from the hub when it is an id ("owner/name", "owner/name@revision").

    Of a hub id, only files that match one of `patterns` are downloaded.

    Raises ModelError when there is no such directory and no such id, or the hub cannot be reached.
    """
    path = Path(model).expanduser()
    if str(model) and path.is_dir():
        return path
    if path.is_file():
        raise ModelError(f"{model}: is a file. Give the directory that holds it, config.json and the other files.")
    if not isinstance(model, str) or not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise ModelError(
            f"{str(model)!r}: no such directory, and not an id on the hub (owner/name). Give a directory that holds "
            "config.json and .safetensors files."
        )
    return _download(model, patterns)


def _download(model: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    name, _, revision = model.partition("@")
    try:
        where = snapshot_download(
            name, revision=revision or None, allow_patterns=list(patterns), ignore_patterns=["*/*"]
        )
    except Exception as error:  # the hub client raises dozens of kinds, for network, rights and names alike
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{model}: no such directory here, and the hub gave nothing ({type(error).__name__}: {reason}). Check the "
            "spelling and the network, or download it elsewhere and give its directory."
        ) from error
    return Path(where)
