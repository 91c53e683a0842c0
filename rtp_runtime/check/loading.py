"""Loading the Hugging Face model that judges: float32, eager, safetensors only, no code from the checkpoint."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rtp_runtime.check.reference import Defect, Reference
from rtp_runtime.errors import CheckpointError, ConfigError, NotJudgedError

NO_TENSOR = "the checkpoint has no tensor for it, so transformers draws random values"
WRONG_SHAPE = "the checkpoint's tensor has another shape than the config says, so transformers draws random values"


def load_reference(path: Path, pool: int | None = None) -> Reference:
    """Load the checkpoint directory with transformers.

    `pool`: its large weights stay in their files, and at most so many bytes of them in memory; None: all are loaded.

    Raises:
        ConfigError: no config, or one without architectures.
        NotJudgedError: transformers does not know the architecture, or cannot be used with this checkpoint.
        CheckpointError: transformers cannot read the weights.
    """
    model_class = _model_class(path)
    if pool is not None:
        return _stream(path, model_class, pool)
    with quiet_transformers():
        try:
            model, info = model_class.from_pretrained(
                str(path),
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **eager(model_class),
            )
        except (OSError, RuntimeError, ValueError, ImportError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CheckpointError(f"{path}: transformers cannot load the reference: {reason}") from error
    unexpected = frozenset(str(name) for name in info["unexpected_keys"])
    return Reference(path, model.eval().requires_grad_(False), _defects(info), unexpected)


def eager(model_class: Any) -> dict[str, str]:
    """Options under which a model computes by its modeling file, as far as its class knows them."""
    options = {"attn_implementation": "eager"}
    if getattr(model_class, "_can_set_experts_implementation", bool)():
        options["experts_implementation"] = "eager"
    return options


def _stream(path: Path, model_class: Any, capacity: int) -> Reference:
    from rtp_runtime.check.streaming import StreamedReference, stream_model

    with quiet_transformers():
        config = model_class.config_class.from_pretrained(str(path), local_files_only=True)
        model, pool, missing = stream_model(path, model_class, config, capacity)
    return StreamedReference(path, model, pool, [Defect(name, NO_TENSOR) for name in missing])


def outline_reference(path: Path, defects: Sequence[Defect]) -> Reference:
    """The reference's modules without values, for a checkpoint that transformers cannot load because of `defects`."""
    model_class = _model_class(path)
    with quiet_transformers(), torch.device("meta"):
        model = model_class(model_class.config_class.from_pretrained(str(path), local_files_only=True))
    return Reference(path, model, defects)


def _model_class(path: Path) -> Any:
    """The class that the config names: of the package, or of the module where transformers keeps its model type."""
    import transformers

    name = _architecture(path)
    found = getattr(transformers, name, None) or _class_of_model_type(path, name)
    if found is None or not hasattr(found, "from_pretrained"):
        raise NotJudgedError(
            f"transformers {transformers.__version__} has no {name}, so there is no reference to check "
            "against: install a version that has it, or give --reference a checkpoint it knows"
        )
    return found


def _architecture(path: Path) -> str:
    config = path / "config.json"
    if not config.is_file():
        raise ConfigError(f"{path} has no config.json: give the directory of a checkpoint, or --reference one")
    try:
        architectures = json.loads(config.read_text(encoding="utf-8")).get("architectures") or []
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{config} is not a JSON object: {error}") from error
    if not architectures:
        raise ConfigError(f'{config} names no architecture: it should have "architectures": ["…ForCausalLM"]')
    return str(architectures[0])


def _class_of_model_type(path: Path, name: str) -> Any:
    """Some classes are not exported at top level: they stand in the modeling module beside their config's."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError):
        return None
    home = type(config).__module__
    if not home.startswith("transformers."):
        return None
    try:
        return getattr(importlib.import_module(home.replace(".configuration_", ".modeling_")), name, None)
    except ImportError:
        return None


def _defects(info: Mapping[str, Any]) -> list[Defect]:
    missing = [Defect(str(name), NO_TENSOR) for name in sorted(info["missing_keys"])]
    mismatched = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"])
    return missing + [Defect(name, WRONG_SHAPE) for name in mismatched]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the terminal."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
