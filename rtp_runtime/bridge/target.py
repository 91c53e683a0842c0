"""Which class a bridge takes, and whether it may: a block of the installed transformers, at the version it was proven
with; never a whole model, a decoder layer or a cache.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from typing import Any

from torch import nn

from rtp_kernel.registry import Support
from rtp_runtime.errors import UnsupportedModelError

HOME = "transformers.models."


@dataclass(frozen=True, slots=True)
class Target:
    """A block of transformers: `"transformers.models.doge.modeling_doge:DogeAttention"`."""

    module: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """Raises UnsupportedModelError for anything outside transformers' models."""
        module, _, name = text.partition(":")
        if not module.startswith(HOME) or not name.isidentifier():
            raise UnsupportedModelError(
                f'a bridge to "{text}": it takes "{HOME}FAMILY.MODULE:CLASS", a block of the installed transformers.'
            )
        return cls(module, name)

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    def block(self) -> type[nn.Module]:
        """The class. Raises UnsupportedModelError when it is not there, or is more than a block."""
        try:
            found = getattr(importlib.import_module(self.module), self.name)
        except (ImportError, AttributeError) as error:
            raise UnsupportedModelError(
                f"a bridge to {self}: transformers {installed_version()} has no such class. Install the version that "
                "the plugin names, or run rtp enable again."
            ) from error
        why = _more_than_a_block(found)
        if why:
            raise UnsupportedModelError(f"a bridge to {self}: {why}; a bridge takes one block, not what holds it.")
        block: type[nn.Module] = found
        return block

    def build(self, config: Any, *args: Any) -> nn.Module:
        """The block on the default device and in the default dtype, what transformers keeps in float32 in float32."""
        own = copy.deepcopy(config)
        own._attn_implementation = own._experts_implementation = "eager"
        try:
            block = self.block()(own, *args).requires_grad_(False).eval()
        except (TypeError, AttributeError) as error:
            raise UnsupportedModelError(f"a bridge to {self}: it is not made of a config alone: {error}.") from error
        kept = self._kept_in_float32()
        for name, parameter in block.named_parameters():
            if any(part in f"{self.name}.{name}" for part in kept):
                parameter.data = parameter.data.float()
        return block

    def _kept_in_float32(self) -> frozenset[str]:
        """Parts of names that transformers' models with this block keep in float32 in every dtype."""
        import transformers

        classes = vars(importlib.import_module(self.module)).values()
        models = [cls for cls in classes if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)]
        names: set[str] = set()
        for model in models:
            names |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        return frozenset(names)


def _more_than_a_block(found: Any) -> str:
    """Why this is no block; empty if it is one."""
    import transformers
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        return "it is no torch module"
    if issubclass(found, transformers.PreTrainedModel):
        return "it is a whole model"
    return "it is a decoder layer" if issubclass(found, GradientCheckpointingLayer) else ""


def installed_version() -> str:
    """The installed transformers' minor version, as "5.24"."""
    import transformers

    return ".".join(transformers.__version__.split(".")[:2])


def proven_with(version: str) -> Support:
    """Whether the installed transformers is the one that a bridge was proven with: for a definition's `accepts`."""
    found = installed_version()
    reason = (
        f"it takes blocks of transformers as they were proven with {version}, and {found} is installed: install "
        f"transformers {version}, or run rtp enable again"
    )
    return Support(True) if found == version else Support(False, (reason,))
