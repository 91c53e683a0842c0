"""The files of a plugin, and putting them in a folder that did not exist before."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rtp_runtime.enable.findings import Decoder
from rtp_runtime.enable.model_file import pinned_keys, write_model
from rtp_runtime.enable.names import PluginNames
from rtp_runtime.enable.sizes import Sizes
from rtp_runtime.enable.templates import render
from rtp_runtime.errors import UsageError


def scaffold(
    names: PluginNames,
    decoder: Decoder,
    config: Any,
    raw: Mapping[str, Any],
    modeling_file: str,
    recognised: Sequence[str],
) -> dict[str, str]:
    """The files of a plugin whose model is written from a recognised decoder: path inside its folder -> text.

    Args:
        config: the full config object, for how it names its sizes.
        raw: config.json as it was read; the plugin's tests shrink it.
    """
    model = write_model(decoder, Sizes.of(config), _title(names), modeling_file)
    return plugin_files(names, model, raw, modeling_file, recognised, pinned=pinned_keys(decoder, model))


def _title(names: PluginNames) -> str:
    return names.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel") or names.architecture


def plugin_files(
    names: PluginNames,
    model: str,
    raw: Mapping[str, Any],
    modeling_file: str,
    recognised: Sequence[str],
    *,
    pinned: Sequence[tuple[str, str]] = (),
    requires: Sequence[str] = (),
) -> dict[str, str]:
    """The files of a plugin around the text of its model.

    Args:
        pinned: config keys and the values that the model was written for, as code.
        requires: distributions that it needs besides rtp-runtime.
    """
    values = _values(names) | {
        "modeling_file": modeling_file,
        "recognised": recognised,
        "pinned": pinned,
        "requires": requires,
    }
    package = f"src/{names.package}"
    return {
        "pyproject.toml": render("pyproject.toml.jinja", **values),
        "README.md": render("README.md.jinja", **values),
        f"{package}/__init__.py": render("init.py.jinja", **values),
        f"{package}/py.typed": "",
        f"{package}/{names.module}.py": model,
        f"tests/test_{names.module}.py": render("test_model.py.jinja", **values),
        "tests/config.json": json.dumps(raw, indent=2, sort_keys=True, ensure_ascii=False) + "\n",
    }


def _values(names: PluginNames) -> dict[str, Any]:
    """What every template may write: names and versions."""
    import transformers

    from rtp_runtime import __version__
    from rtp_runtime.hookspecs import API_VERSION

    return {
        "names": names,
        "title": _title(names),
        "api": API_VERSION,
        "runtime_version": ".".join(__version__.split(".")[:2]),
        "transformers_version": transformers.__version__,
    }


def check_target(target: Path) -> None:
    """Raises UsageError when `target` exists already, or lies where no folder can be made."""
    if target.exists() or target.is_symlink():
        raise UsageError(
            f"{target}: exists already, and nothing is ever overwritten. Remove it, or give another folder with --out."
        )
    parent = next(folder for folder in (target.parent, *target.parent.parents) if folder.exists())
    if not parent.is_dir():
        raise UsageError(f"{target}: cannot be made, because {parent} is not a folder. Give another one with --out.")


def write_files(files: Mapping[str, str], target: Path) -> None:
    """Write the folder `target` whole or not at all.

    Raises:
        UsageError: it exists already, or cannot be written.
    """
    check_target(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".rtp-enable-") as temporary:
            whole = Path(temporary) / "plugin"
            fill(files, whole)
            whole.chmod(0o755)
            shutil.move(whole, target)
    except OSError as error:
        raise UsageError(f"{target}: cannot be written ({error.strerror}). Give another folder with --out.") from error


def fill(files: Mapping[str, str], folder: Path) -> None:
    """Write each file below `folder`."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
