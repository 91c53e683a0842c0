"""The Hugging Face implementation as a witness: its class, its module tree without weights, a small random copy.

Nothing of a checkpoint is read here but its config. Code that a checkpoint ships runs only with `trust_remote_code`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from rtp_runtime.errors import ConfigError, UnsupportedModelError
from rtp_runtime.testing.shrink import shrink_config
from rtp_runtime.testing.tiny_models import randomise

HEADS = 8
"""More than anything else in a config counts, so that a number found at work names its key."""
MAX_ELEMENTS = 100_000_000
"""A shrunken copy with more parameters than this was not shrunk: some width goes by a name nobody here knows."""


@dataclass(frozen=True)
class Reference:
    """A small random copy of the reference and what it read of its config."""

    model: Any
    config: Any
    """The shrunken config: same switches, other sizes, and distinct values for eps and multipliers."""
    reads: dict[str, set[str]] = field(default_factory=dict)
    """Config attribute -> the classes of the modeling file that read it."""

    def save(self, directory: Path) -> None:
        """Write the copy as a checkpoint."""
        tracked = type(self.config)
        self.config.__class__ = tracked.__mro__[1]
        try:
            save_quietly(self.model, directory)
        finally:
            self.config.__class__ = tracked


def save_quietly(model: Any, directory: Path) -> None:
    """`save_pretrained` without a progress bar."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
    finally:
        if bars:
            logging.enable_progress_bar()


def reference_class(architecture: str, config: Any, trust_remote_code: bool = False, path: str | None = None) -> Any:
    """The class that transformers (or, if trusted, the checkpoint) provides for `architecture`.

    Raises:
        UnsupportedModelError: there is none, or it cannot be imported.
        ConfigError: it is made for the configs of another model type.
    """
    import transformers

    known: Any = getattr(transformers, architecture, None)
    if isinstance(known, type) and issubclass(known, transformers.PreTrainedModel):
        wanted = getattr(known, "config_class", None)
        if wanted is not None and not isinstance(config, wanted) and not _is_mapped(config, architecture):
            raise ConfigError(
                f"model_type {getattr(config, 'model_type', None)!r} and architecture {architecture!r} do not belong "
                f"together: that class is for model_type {wanted.model_type!r}. Correct config.json."
            )
        return known
    remote = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if remote and trust_remote_code and path is not None:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(remote, path)
    hint = " Its own code would run with --trust-remote-code." if remote else ""
    raise UnsupportedModelError(
        f"transformers {transformers.__version__} has no class {architecture!r}, so there is no reference to read the "
        f"model from.{hint} Use a transformers that knows it, or write the plugin by hand: docs/adding-a-model.md."
    )


def _is_mapped(config: Any, architecture: str) -> bool:
    """Whether transformers takes this class for decoders of the config's model type, as some types borrow another's."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return bool(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(getattr(config, "model_type", None)) == architecture)


def meta_model(cls: Any, config: Any) -> nn.Module:
    """The reference at full size on the meta device: names and shapes, no memory."""
    import torch

    with torch.device("meta"):
        return _build(cls, config)


def small_reference(cls: Any, config: Any, seed: int = 0) -> Reference:
    """The reference at test size with every layer of the original, random float32 weights and eager attention.

    Raises:
        UnsupportedModelError: its sizes go by names that could not be shrunk.
    """
    import torch

    small = shrink_config(config, layers=config.num_hidden_layers, heads=HEADS)
    _spread(small)
    elements = sum(parameter.numel() for parameter in meta_model(cls, small).parameters())
    if elements > MAX_ELEMENTS:
        raise UnsupportedModelError(
            f"{cls.__name__} still has {elements:,} parameters after its config was cut to test size; its widths go by "
            "names that rtp enable does not know. Write the plugin by hand: docs/adding-a-model.md."
        )
    torch.manual_seed(seed)
    reads = track_reads(small, cls.__module__)
    model = _build(cls, small).float().eval()
    randomise(model, seed)
    return Reference(model, small, reads)


def resized_reference(cls: Any, config: Any, seed: int = 1) -> Any:
    """A small random copy of other sizes and values, as the tests of a plugin make it from its config."""
    import torch

    torch.manual_seed(seed)
    model = _build(cls, shrink_config(config)).float().eval()
    return randomise(model, seed)


def _build(cls: Any, config: Any) -> nn.Module:
    built: nn.Module = cls._from_config(config, attn_implementation="eager")
    return built


def _spread(config: Any) -> None:
    """Give each eps and each multiplier a value of its own, so that a value found at work names its key."""
    step = 0
    for key, value in config.to_dict().items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value:
            continue
        if re.search(r"(^|_)eps(ilon)?$|norm_epsilon$", key):
            step += 1
            setattr(config, key, 1e-3 * (1 + 0.17 * step))
        elif isinstance(value, float) and value != 1.0 and re.search(r"scal|multiplier|cap", key):
            step += 1
            setattr(config, key, value * (1 + 0.013 * step))


def track_reads(config: Any, module: str) -> dict[str, set[str]]:
    """From now on, note which attributes code of `module` reads from `config`, and in which of its classes."""
    original = type(config)
    reads: dict[str, set[str]] = {}

    class Tracked(original):  # type: ignore[valid-type, misc]
        def __getattribute__(self, name: str) -> Any:
            frame = sys._getframe(1)
            if frame.f_globals.get("__name__") == module:
                reads.setdefault(name, set()).add(frame.f_code.co_qualname.split(".")[0])
            return super().__getattribute__(name)

    Tracked.__name__ = original.__name__
    config.__class__ = Tracked
    return reads
