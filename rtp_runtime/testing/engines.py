"""What a model keeps in whatever way its engine runs: equal bits where that is asked for, prefixes, bfloat16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rtp_runtime.testing.compare import NUM_BLOCKS, reference_logits

if TYPE_CHECKING:
    from rtp_runtime import LLM

FIRST_ID, LAST_ID = 3, 380
"""Drawn ids lie between the special ones and the end of the smallest tiny vocabulary."""
NUM_NEW = 6
MODES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "chunks": {"max_chunk_tokens": 7},
        "one token at a time": {"max_chunk_tokens": 1},
        "mixed": {"max_num_batched_tokens": 11, "max_num_seqs": 3},
    }
)
"""Ways in which prompts run together: limits of the engine."""


def assert_deterministic(
    directory: Path, dtype: str, lengths: Sequence[int] = (5, 23, 1, 40), modes: Mapping[str, Any] = MODES
) -> None:
    """Prompts of `lengths` and their continuations have the same logits, bit for bit, alone and in each mode."""
    from rtp_runtime import LLM, EngineConfig

    loaded, prompts = _load(directory, dtype, deterministic=True), draw(*lengths)

    def engine(**limits: Any) -> LLM:
        return LLM.from_loaded(loaded, EngineConfig(num_blocks=NUM_BLOCKS, deterministic=True, **limits))

    alone = [_run(engine(), [prompt])[0] for prompt in prompts]
    for mode, limits in modes.items():
        for ours, wanted in zip(_run(engine(**limits), prompts), alone, strict=True):
            assert torch.equal(ours, wanted), mode


def assert_reuse_changes_nothing(directory: Path) -> None:
    """Requests that begin alike continue as they do without a cache of prefixes, and find what others computed."""
    from rtp_runtime import LLM, EngineConfig

    loaded = _load(directory, "float32")
    begin, *ends = draw(80, 9, 1, 30)
    prompts = [begin, *(begin + end for end in ends)]

    def tokens(caching: bool) -> tuple[list[list[int]], int]:
        with LLM.from_loaded(loaded, EngineConfig(num_blocks=NUM_BLOCKS, prefix_caching=caching)) as llm:
            found = [list(llm.generate([prompt], _greedy())[0].token_ids) for prompt in prompts]
            return found, llm.engine.stats.prefix_hits

    cached, hits = tokens(caching=True)
    assert (cached, 0) == tokens(caching=False)
    assert hits > 0


def assert_bfloat16_is_as_near(model: Any, directory: Path) -> None:
    """Our bfloat16 is as near to float32 as the reference's, half as much error more allowed.

    Args:
        model: the reference of the checkpoint in float32, which is bfloat16 afterwards.
        directory: the checkpoint.
    """
    from rtp_runtime import LLM, EngineConfig

    (prompt,) = draw(50)
    exact, theirs = reference_logits(model, prompt), reference_logits(model.bfloat16(), prompt)
    with LLM.from_loaded(_load(directory, "bfloat16"), EngineConfig(num_blocks=NUM_BLOCKS)) as llm:
        ours = llm.logits(prompt)
    assert (ours - exact).square().mean() <= 1.5 * (theirs - exact).square().mean()


def draw(*lengths: int) -> list[list[int]]:
    """Random ids of these lengths."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(FIRST_ID, LAST_ID, (length,), generator=generator).tolist() for length in lengths]


def _load(directory: Path, dtype: str, deterministic: bool = False) -> Any:
    from rtp_runtime.model import load_model
    from rtp_runtime.plugins import load_plugins

    return load_model(directory, dtype=dtype, deterministic=deterministic, plugins=load_plugins())


def _greedy() -> Any:
    from rtp_runtime import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)


def _run(llm: LLM, prompts: Sequence[list[int]]) -> list[Tensor]:
    """Logits of each prompt and its greedy continuation, by an engine that is closed after it."""
    with llm:
        ids = [llm.engine.add(prompt, _greedy(), return_logits=True) for prompt in prompts]
        while llm.engine.has_work:
            llm.engine.step()
        return [logits for name in ids if (logits := llm.engine.output(name).logits) is not None]
