"""Whether a scaffold computes what the reference computes: both run on the same small random checkpoint."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rtp_runtime.enable.names import PluginNames
from rtp_runtime.enable.reference import Reference, save_quietly
from rtp_runtime.enable.scaffold import fill
from rtp_runtime.plugins import Plugins, load_plugins
from rtp_runtime.testing.compare import TOLERANCE, logits_error, noise, reference_logits

if TYPE_CHECKING:
    from rtp_runtime import LLM
    from rtp_runtime.model import LoadedModel

LENGTHS = (1, 37, 90)
CHUNKS = {"whole": 256, "chunks": 16, "single tokens": 1}
LONGEST_OF_SINGLES = 37
NEW_TOKENS = 6
PREEMPTED_AFTER = (2, 5)
"""Steps of a batch after which a running request loses its state."""


@dataclass(frozen=True)
class Proof:
    """The scaffold's logits against the reference's, and the tokens it continues prompts with."""

    error: float
    tolerance: float
    """TOLERANCE, or where that is passed three times the difference of the reference's own attention paths."""
    num_layers: int
    by_mode: Mapping[str, float]
    """How prompts were run -> the largest error; of "batch", how far a chosen token is below the best one."""

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance

    @property
    def worst(self) -> str:
        """How prompts were run when they differed most."""
        return max(self.by_mode, key=self.by_mode.__getitem__)


def prove(reference: Reference, resized: Any, names: PluginNames, files: Mapping[str, str]) -> Proof:
    """Run the scaffold, through our engine, on the small reference's own weights.

    `resized`: a copy of other sizes, in which two keys that held one number by chance differ; None without one.

    Raises:
        RtpError: it cannot be loaded at all.
    """
    from rtp_runtime.model import load_model

    with tempfile.TemporaryDirectory(prefix="rtp-enable-") as temporary:
        checkpoint = Path(temporary) / "checkpoint"
        reference.save(checkpoint)
        with importable(names, files, Path(temporary) / "plugin") as plugins:
            options: Any = {"dtype": "float32", "plugins": plugins}
            loaded = load_model(checkpoint, **options)
            errors = dict(_errors(reference, loaded))
            if resized is not None:
                save_quietly(resized, Path(temporary) / "resized")
                errors["other sizes"] = _resized_error(resized, load_model(Path(temporary) / "resized", **options))
    error, tolerance = max(errors.values()), TOLERANCE
    if error > tolerance:  # measured when it matters: it takes longer than all the rest
        prompts = _prompts(reference.config.vocab_size)
        tolerance = max(tolerance, 3 * max(noise(reference.model, ids) for ids in prompts))
    return Proof(error, tolerance, reference.config.num_hidden_layers, errors)


def first_error(reference: Reference, checkpoint: Path, plugins: Plugins) -> float:
    """Of the logits of one whole prompt: enough to see that something differs.

    Raises:
        RtpError: the model cannot be loaded.
    """
    from rtp_runtime.model import load_model

    ids = _prompts(reference.config.vocab_size)[1]
    with _engine(load_model(checkpoint, dtype="float32", plugins=plugins), CHUNKS["whole"]) as llm:
        return logits_error(llm, reference.model, ids)


def _prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]


def _errors(reference: Reference, loaded: LoadedModel) -> Iterator[tuple[str, float]]:
    """Prompts whole, in chunks, token by token, and together with preemption: the state as well as the layers."""
    prompts = _prompts(reference.config.vocab_size)
    for name, chunk in CHUNKS.items():
        with _engine(loaded, chunk) as llm:
            asked = [ids for ids in prompts if chunk > 1 or len(ids) <= LONGEST_OF_SINGLES]
            yield name, max(logits_error(llm, reference.model, ids) for ids in asked)
    with _engine(loaded, 24) as llm:
        outputs = _continue(llm, prompts)
    yield "batch", max(_token_error(reference.model, ids, found) for ids, found in zip(prompts, outputs, strict=True))


def _resized_error(model: Any, loaded: LoadedModel) -> float:
    with _engine(loaded, CHUNKS["whole"]) as llm:
        return max(logits_error(llm, model, ids) for ids in _prompts(model.config.vocab_size))


def _engine(loaded: LoadedModel, chunk: int) -> LLM:
    from rtp_runtime import LLM, EngineConfig

    limits: dict[str, Any] = {"max_num_batched_tokens": max(chunk, 4), "max_chunk_tokens": chunk}
    return LLM.from_loaded(loaded, EngineConfig(max_num_seqs=4, max_model_len=128, num_blocks=64, **limits))


def _continue(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of all prompts in one batch, two of which lose their state on the way."""
    from rtp_runtime import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    engine = llm.engine
    names = [engine.add(ids, params) for ids in prompts]
    found: dict[str, list[int]] = {name: [] for name in names}
    step = 0
    while engine.has_work:
        for news in engine.step():
            found[news.request_id] = list(engine.output(news.request_id, news).token_ids)
        step += 1
        if step in PREEMPTED_AFTER:
            engine.preempt(names[-1 - PREEMPTED_AFTER.index(step)])
    return [found[name] for name in names]


def _token_error(model: Any, ids: list[int], tokens: list[int]) -> float:
    """How far the reference's logits of `tokens` are below its best ones, over their spread: 0 when they are these."""
    logits = reference_logits(model, [*ids, *tokens])[len(ids) - 1 : -1]  # [new tokens, vocabulary]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    gap = float(((logits.amax(-1) - chosen) / logits.std(-1)).max())
    return gap if len(tokens) == NEW_TOKENS else float("inf")


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
