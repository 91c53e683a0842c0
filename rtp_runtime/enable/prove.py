"""Whether a scaffold computes what the reference computes: both run on the same small random checkpoint."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rtp_runtime.enable.names import PluginNames
from rtp_runtime.enable.reference import Reference
from rtp_runtime.enable.scaffold import fill
from rtp_runtime.plugins import Plugins, load_plugins
from rtp_runtime.testing.compare import TOLERANCE, logits_error, noise

LENGTHS = (1, 37, 90)


@dataclass(frozen=True)
class Proof:
    """The scaffold's logits against the reference's."""

    error: float
    tolerance: float
    """The larger of TOLERANCE and three times the difference of the reference's own attention paths."""
    num_layers: int

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance


def prove(reference: Reference, names: PluginNames, files: Mapping[str, str]) -> Proof:
    """Run the scaffold, through our engine, on the small reference's own weights.

    Raises:
        RtpError: it cannot be loaded at all.
    """
    with tempfile.TemporaryDirectory(prefix="rtp-enable-") as temporary:
        checkpoint = Path(temporary) / "checkpoint"
        reference.save(checkpoint)
        with importable(names, files, Path(temporary) / "plugin") as plugins:
            error = max(_errors(reference, checkpoint, plugins))
    disagreement = max(noise(reference.model, ids) for ids in _prompts(reference.config.vocab_size))
    return Proof(error, max(TOLERANCE, 3 * disagreement), reference.config.num_hidden_layers)


def _prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]


def _errors(reference: Reference, checkpoint: Path, plugins: Plugins) -> Iterator[float]:
    """Whole prompts, then in chunks of a few tokens: the state as well as the layers."""
    from rtp_runtime import LLM, EngineConfig
    from rtp_runtime.model import load_model

    loaded = load_model(checkpoint, dtype="float32", plugins=plugins)
    for chunk in (256, 16):
        config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=chunk, max_model_len=128, num_blocks=64)
        with LLM.from_loaded(loaded, config) as llm:
            for ids in _prompts(reference.config.vocab_size):
                yield logits_error(llm, reference.model, ids)


@contextmanager
def importable(names: PluginNames, files: Mapping[str, str], folder: Path) -> Iterator[Plugins]:
    """The scaffold as a loaded plugin, from a folder of its own, and forgotten afterwards."""
    fill(files, folder)
    source = str(folder / "src")
    hidden = _forget(names.package)
    sys.path.insert(0, source)
    try:
        yield load_plugins([names.package], env=False)
    finally:
        sys.path.remove(source)
        _forget(names.package)
        sys.modules.update(hidden)


def _forget(package: str) -> dict[str, Any]:
    ours = [name for name in sys.modules if name == package or name.startswith(f"{package}.")]
    return {name: sys.modules.pop(name) for name in ours}
