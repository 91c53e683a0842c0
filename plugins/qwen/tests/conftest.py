"""What each model type of this plugin must satisfy against transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rtp_runtime import LLM, SamplingParams
from rtp_runtime.model import load_model
from rtp_runtime.model.export import export_model
from rtp_runtime.plugins import load_plugins
from rtp_runtime.testing.tiny_models import VOCAB_SIZE, write_tiny

PROMPT_LENGTHS = (1, 37, 300)


def draw_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


def assert_logits_agree(llm: LLM, reference: Any, prompt: list[int]) -> None:
    """Within 2e-5 of the logits' spread: what two float32 paths of the reference itself differ by."""
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0].float()
    error = (llm.logits(prompt) - expected).abs().max() / expected.std()
    assert error < 2e-5, f"{len(prompt)} tokens: {error:.2e}"


def assert_greedy_agrees(llm: LLM, reference: Any, prompt: list[int]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    ours = llm.generate(prompt, params)[0].token_ids
    reference.generation_config.eos_token_id = None  # as ignore_eos: min_new_tokens would mask it instead
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0)
    assert ours == expected[0, len(prompt) :].tolist()


@pytest.fixture
def assert_matches_reference() -> Callable[..., None]:
    """Logits, greedy continuation and the export round trip of a tiny checkpoint with these config values."""

    def check(name: str, seed: int = 0, **overrides: Any) -> None:
        with tempfile.TemporaryDirectory() as directory:
            reference = write_tiny(name, directory, seed, **overrides)
            reference.set_attn_implementation("eager")
            reference.set_experts_implementation("eager")
            with LLM(directory, dtype="float32", max_num_seqs=4, num_blocks=64) as llm:
                for length in PROMPT_LENGTHS:
                    assert_logits_agree(llm, reference, draw_prompt(length, seed + length))
                assert_greedy_agrees(llm, reference, draw_prompt(20, seed))

    return check


@pytest.fixture
def assert_exports_what_it_loaded(tmp_path: Path) -> Callable[[Path], None]:
    """Every tensor of the checkpoint comes back with its name, dtype and bytes."""

    def check(checkpoint: Path) -> None:
        loaded = load_model(checkpoint, dtype="float32", plugins=load_plugins())
        export_model(loaded, tmp_path / "exported")
        before = load_file(checkpoint / "model.safetensors")
        after = load_file(tmp_path / "exported" / "model.safetensors")
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name

    return check


@pytest.fixture
def assert_axes_agree() -> Callable[..., None]:
    """Logits where time, height and width of the positions differ, as for the tokens of an image, in chunks."""

    def check(name: str, **overrides: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, VOCAB_SIZE, (40,), generator=generator).tolist()
        axes = torch.arange(len(ids)) + torch.randint(0, 20, (3, len(ids)), generator=generator)

        def with_axes(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            batch, *rest = args
            return (replace(batch, positions=axes[:, batch.index.clamp(min=0)]), *rest)

        with tempfile.TemporaryDirectory() as directory:
            reference = write_tiny(name, directory, 0, **overrides)
            with torch.no_grad():
                expected = reference(torch.tensor([ids]), position_ids=axes[:, None]).logits[0].float()
                plain = reference(torch.tensor([ids])).logits[0].float()
            assert (plain - expected).abs().max() > 1e-2 * expected.std()
            for chunk in (64, 7):
                with LLM(directory, dtype="float32", num_blocks=16, max_num_seqs=2, max_chunk_tokens=chunk) as llm:
                    llm.model.register_forward_pre_hook(with_axes)
                    error = (llm.logits(ids) - expected).abs().max() / expected.std()
                    assert error < 2e-5, f"chunks of {chunk}: {error:.2e}"

    return check
