"""Real tiny checkpoints against transformers: logits and greedy tokens, whole, in chunks, mixed and preempted."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from rtp_runtime import LLM, SamplingParams
from rtp_runtime.engine import EngineConfig
from rtp_runtime.model import LoadedModel, load_model
from rtp_runtime.testing.tiny_models import VOCAB_SIZE, write_tiny

NAMES = ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe"]
LENGTHS = (1, 9, 40)
NEW = 12
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True)
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"max_chunk_tokens": 7},
    "one token at a time": {"max_chunk_tokens": 1},
    "mixed": {"max_num_batched_tokens": 11, "max_num_seqs": 3},
    "preempted": {"num_blocks": 5},
    "two steps ahead": {"depth": 2},
}


class Case:
    """A checkpoint, our model and the reference's answers."""

    def __init__(self, name: str, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        write_tiny(name, path)
        self.path = path
        self.loaded: LoadedModel = load_model(path, dtype="float32")
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        draw = torch.Generator().manual_seed(5)
        self.prompts = [torch.randint(4, VOCAB_SIZE, (length,), generator=draw).tolist() for length in LENGTHS]
        self.tokens: list[list[int]] = []
        self.logits: list[torch.Tensor] = []
        with torch.inference_mode():
            for prompt in self.prompts:
                ids = reference.generate(
                    torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
                )
                self.tokens.append(ids[0, len(prompt) :].tolist())
                self.logits.append(reference(ids[:, :-1]).logits[0])


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_equals_the_reference(case: Case, mode: str) -> None:
    llm = LLM.from_loaded(case.loaded, EngineConfig(**({"num_blocks": 64} | MODES[mode])))
    llm.engine._state.poison()
    ids = [llm.engine.add(prompt, PARAMS, return_logits=True) for prompt in case.prompts]
    while llm.engine.has_work:
        llm.engine.step()
    assert bool(llm.engine.num_preemptions) == (mode == "preempted")
    for name, tokens, logits in zip(ids, case.tokens, case.logits, strict=True):
        output = llm.engine.output(name)
        assert output.token_ids == tokens
        assert output.logits is not None and output.logits.shape == logits.shape
        assert (output.logits - logits).abs().max() <= 2e-5 * logits.std()


@pytest.mark.parametrize("mode", ["whole", "mixed", "two steps ahead"])
def test_nan_in_the_rows_and_state_of_others(case: Case, mode: str) -> None:
    """One request's embeddings, and so its keys and values, are NaN from its first token on."""
    marked = 3

    def spoil(module: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill((args[0] == marked)[:, None], float("nan"))

    llm = LLM.from_loaded(case.loaded, EngineConfig(**({"num_blocks": 64} | MODES[mode])))
    llm.engine._state.poison()
    hook = llm.model.get_submodule("model.embed_tokens").register_forward_hook(spoil)
    try:
        llm.engine.add([marked] * 21, PARAMS)
        ids = [llm.engine.add(prompt, PARAMS, return_logits=True) for prompt in case.prompts]
        while llm.engine.has_work:
            llm.engine.step()
    finally:
        hook.remove()
    for name, prompt, tokens, logits in zip(ids, case.prompts, case.tokens, case.logits, strict=True):
        assert marked not in prompt + tokens
        output = llm.engine.output(name)
        assert output.token_ids == tokens and output.logits is not None
        assert (output.logits - logits).abs().max() <= 2e-5 * logits.std()


def test_logits_and_generate(case: Case) -> None:
    llm = LLM.from_loaded(case.loaded, EngineConfig(num_blocks=64))
    assert [output.token_ids for output in llm.generate(case.prompts, PARAMS)] == case.tokens
    for prompt, logits in zip(case.prompts, case.logits, strict=True):
        ours = llm.logits(prompt)
        assert ours.dtype == torch.float32 and ours.shape == (len(prompt), VOCAB_SIZE)
        assert (ours - logits[: len(prompt)]).abs().max() <= 2e-5 * logits.std()


def run_all(llm: LLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of each prompt and its greedy continuation."""
    ids = [llm.engine.add(prompt, PARAMS, return_logits=True) for prompt in prompts]
    while llm.engine.has_work:
        llm.engine.step()
    return [llm.engine.output(name).logits for name in ids]  # type: ignore[misc]


@pytest.mark.parametrize(("case", "dtype"), [("qwen2", "bfloat16"), ("qwen2_moe", "float32")], indirect=["case"])
def test_deterministic_logits_are_bit_equal_in_every_mode(case: Case, dtype: str) -> None:
    loaded = load_model(case.path, dtype=dtype, deterministic=True)
    results: dict[str, list[torch.Tensor]] = {}
    for mode in ("chunks", "mixed", "preempted"):
        limits = MODES[mode]
        config = EngineConfig(**({"num_blocks": 64, "deterministic": True} | limits))
        results[mode] = run_all(LLM.from_loaded(loaded, config), case.prompts)
    alone = EngineConfig(num_blocks=64, deterministic=True)
    results["alone"] = [run_all(LLM.from_loaded(loaded, alone), [prompt])[0] for prompt in case.prompts]
    for mode, logits in results.items():
        for ours, expected in zip(logits, results["alone"], strict=True):
            assert torch.equal(ours, expected), mode


def test_one_llm_after_another(case: Case) -> None:
    """Each loads the checkpoint anew, and a dropped one leaves neither weights nor state behind."""
    for _ in range(2):
        llm = LLM(case.path, dtype="float32", num_blocks=64)
        assert llm.generate(case.prompts[1], PARAMS)[0].token_ids == case.tokens[1]
        weights = [weakref.ref(parameter) for parameter in llm.model.parameters()]
        arena = weakref.ref(llm.engine._state.arena.buffer)
        del llm
        gc.collect()
        assert arena() is None
        assert not [each for each in weights if each() is not None]
