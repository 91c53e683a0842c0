"""Tiny random checkpoints in float32 of every model type served here, written by transformers under the hub's names.

Every parameter is redrawn: at transformers' own initial values (norms at 1, biases at 0) an implementation that forgets
a norm weight or a bias would still match.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rtp_runtime.testing.tiny_configs import COMMON, TINY, VOCAB_SIZE, Tiny, rope

__all__ = [
    "COMMON",
    "TINY_NAMES",
    "VOCAB_SIZE",
    "build_tiny",
    "draw_buffer",
    "draw_parameter",
    "randomise",
    "rope",
    "tiny_config",
    "write_tiny",
]

TINY_NAMES = tuple(TINY)


def tiny_config(name: str, **overrides: Any) -> Any:
    """transformers' config of the model `name` (`TINY_NAMES`); `overrides` replace values of its text part."""
    tiny = TINY[name]
    values = copy.deepcopy(tiny.text) | overrides
    config_class = _transformers_class(tiny.config, tiny)
    if tiny.vision is not None:
        values = {"text_config": values, "vision_config": copy.deepcopy(tiny.vision), **tiny.outer}
    config = config_class(**values)
    config.dtype = "float32"
    return config


def build_tiny(name: str, seed: int = 0, **overrides: Any) -> Any:
    """The transformers model `name` (`TINY_NAMES`) in memory, in eval mode; `overrides` as in `tiny_config`."""
    tiny = TINY[name]
    config = tiny_config(name, **overrides)
    torch.manual_seed(seed)
    model = _transformers_class(tiny.model, tiny)(config).float().eval()
    return randomise(model, seed)


def write_tiny(
    name: str, directory: str | Path, seed: int = 0, *, max_shard_size: str | int = "50GB", **overrides: Any
) -> Any:
    """`build_tiny`, saved as a checkpoint in `directory`; returns the model in memory as the reference."""
    model = build_tiny(name, seed, **overrides)
    Path(directory).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def _transformers_class(name: str, tiny: Tiny) -> Any:
    import importlib

    import transformers

    home = importlib.import_module(f"transformers.models.{tiny.module}") if tiny.module else transformers
    return getattr(home, name, None) or getattr(transformers, name)


@torch.no_grad()
def randomise(model: Any, seed: int = 0) -> Any:
    """Redraw every parameter and the buffers that hold values of a checkpoint, so that faults show.

    Embeddings are small (std 0.02): an eps then matters, and a tied head does not simply repeat its input. Queries are
    scaled up so that attention is not flat. Router biases sit around 8, where bfloat16 would round them together. In
    layer 1 the low-rank projections are small, which makes their norms' own eps visible.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(draw_parameter(name, parameter, generator))
    for name, buffer in model.named_buffers():
        drawn = draw_buffer(name, buffer, generator, model.config)
        if drawn is not buffer:
            buffer.copy_(drawn)
    return model


def draw_buffer(name: str, buffer: Tensor, generator: torch.Generator, config: Any) -> Tensor:
    """A buffer's new value: `randomise`'s for those that hold values of a checkpoint, else its own."""
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "e_score_correction_bias":
        return 8 + _normal(buffer, 0.2, generator)
    if leaf != "tid2eid":
        return buffer
    experts = config.get_text_config().n_routed_experts
    rows = [torch.randperm(experts, generator=generator)[: buffer.shape[1]] for _ in range(buffer.shape[0])]
    return torch.stack(rows)


def _normal(like: Tensor, std: float, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator).to(like.dtype) * std


def draw_parameter(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    """A parameter's new value by `randomise`'s rules.

    Of one with two axes or more only the shape matters, so that rows may be drawn part by part; it may be on meta.
    """
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "A_log":
        return torch.log(torch.rand(parameter.shape, generator=generator) * 4 + 0.5)
    if leaf == "dt_bias" or name.endswith("dt_proj.bias"):
        return _normal(parameter, 0.5, generator)
    if leaf in ("hc_scale", "scale"):
        return 1 + _normal(parameter, 0.1, generator)
    if leaf == "e_score_correction_bias":
        return 8 + _normal(parameter, 0.2, generator)
    if parameter.ndim == 1:
        return parameter + _normal(parameter, 0.2, generator)
    if "conv1d" in name:
        return _normal(parameter, 0.3, generator)
    if "embed_tokens" in name or "ngram_embedding" in name:
        return _normal(parameter, 0.02, generator)
    module = name.split(".")[-2]
    gain = 2.0 if leaf == "weight" and module in ("q_proj", "q_b_proj") else 1.0
    drawn = _normal(parameter, parameter.shape[-1] ** -0.5 * gain, generator)
    return drawn * 0.03 if ".layers.1." in name and module in ("q_a_proj", "kv_a_proj_with_mqa") else drawn
