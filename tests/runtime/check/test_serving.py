"""The serving stage: clean models round no worse than the reference, whose values are its own again afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rtp_runtime.check import CheckOptions, StageResult, run_check
from rtp_runtime.check.loading import load_reference, quiet_transformers
from rtp_runtime.check.reference import Reference
from rtp_runtime.check.report import MATCH
from rtp_runtime.check.serving.floors import path_ratios
from rtp_runtime.check.serving.narrow import narrowed, rounded
from rtp_runtime.check.serving.ratio import Ratio, rounding_unit
from rtp_runtime.check.serving.runs import capture_twin
from rtp_runtime.check.serving.table import TOO_MUCH
from rtp_runtime.testing.tiny_models import write_tiny

Checkpoint = Callable[[str], Path]
BFLOAT16 = rounding_unit(torch.bfloat16)


def serving(model: Path, reference: Reference | None = None, **more: Any) -> StageResult:
    options = CheckOptions(model=model, stages=("serving",), lengths=(10, 40), num_new_tokens=4, **more)
    report = run_check(options, reference=reference)
    return next(stage for stage in report.stages if stage.name == "serving")


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v32", "qwen3_next"])
def test_clean_models_round_as_the_reference(
    name: str, checkpoint: Checkpoint, reference: Callable[[str], Reference]
) -> None:
    before = {key: value.clone() for key, value in reference(name).model.state_dict().items()}
    stage = serving(checkpoint(name), reference(name))
    after = reference(name).model.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert (stage.status, stage.findings) == (MATCH, [])
    ratios = [measure for measure in stage.measures if measure.name != "logits"]
    assert len(ratios) > 50
    assert max(measure.error for measure in ratios) < TOO_MUCH
    if name == "deepseek_v32":
        choices_are_counted(stage)


def choices_are_counted(stage: StageResult) -> None:
    flips = stage.numbers["flips"]
    assert set(flips) == {"0", "1", "2"}
    assert sum(layer["reference"] for layer in flips.values()) > 0
    assert all(layer["ours"] <= layer["tokens"] for layer in flips.values())
    assert any("rounding changed what was chosen" in note for note in stage.notes)


def test_another_seed_in_float16_rounds_as_the_reference(tmp_path: Path) -> None:
    write_tiny("qwen3", tmp_path / "model", 3)
    stage = serving(tmp_path / "model", seed=3, dtype="float16")
    assert (stage.status, stage.findings) == (MATCH, [])


def test_float32_is_not_judged(checkpoint: Checkpoint, reference: Callable[[str], Reference]) -> None:
    stage = serving(checkpoint("qwen3"), reference("qwen3"), dtype="float32")
    assert (stage.measures, stage.findings, stage.not_judged) == ([], [], [])
    assert "nothing is rounded" in stage.summary


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5"])
def test_copy_is_what_transformers_loads(
    name: str, dtype: torch.dtype, checkpoint: Checkpoint, reference: Callable[[str], Reference]
) -> None:
    with quiet_transformers():
        copy = narrowed(reference(name), dtype).model
        loaded = type(copy).from_pretrained(str(checkpoint(name)), dtype=dtype)
    for tensors in ("named_parameters", "named_buffers"):
        wanted = dict(getattr(loaded, tensors)())
        found = dict(getattr(copy, tensors)())
        assert found.keys() == wanted.keys()
        assert all(found[key].dtype == wanted[key].dtype for key in wanted)
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert copy.lm_head.weight.data_ptr() != reference(name).model.lm_head.weight.data_ptr()


def test_rounded_weights_are_restored_after_an_error(checkpoint: Checkpoint) -> None:
    reference = load_reference(checkpoint("qwen3"))
    before = {key: value.clone() for key, value in reference.model.state_dict().items()}
    with quiet_transformers():
        narrow = narrowed(reference, torch.bfloat16)
    with pytest.raises(ValueError, match="stop"), rounded(reference, narrow) as changed:
        assert changed > 0
        weight = reference.model.lm_head.weight
        assert torch.equal(weight, narrow.model.lm_head.weight.float())
        raise ValueError("stop")
    assert all(torch.equal(before[key], value) for key, value in reference.model.state_dict().items())


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3"])
def test_the_references_other_paths_stay_within_the_bounds(name: str, reference: Callable[[str], Reference]) -> None:
    exact = reference(name)
    with quiet_transformers():
        narrow = narrowed(exact, torch.bfloat16)
    ids = tuple((7 * place + 3) % exact.vocab_size for place in range(120))
    with rounded(exact, narrow):
        twin = capture_twin("drawn", ids, exact, narrow, exact.layers)
        found = dict(path_ratios(narrow, twin, exact.layers))
    assert "sdpa attention" in found
    for ratios in found.values():
        assert max(ratios.values()) < TOO_MUCH


def test_ratio_of_the_same_noise_is_one_and_of_twice_is_two() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(400, 32, generator=generator)
    one, other = (0.01 * torch.randn(400, 32, generator=generator) for _ in range(2))
    index = torch.arange(400)
    for factor in (1.0, 2.0):
        ratio = Ratio(BFLOAT16)
        ratio.add(exact + factor * one, (exact + other).bfloat16(), exact, index)
        assert ratio.measured == pytest.approx(factor, rel=0.05)
        assert 1.0 < ratio.allowance < 1.1


def test_a_copy_is_measured_in_roundings_of_its_dtype() -> None:
    exact = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    index = torch.arange(300)
    ratio = Ratio(BFLOAT16)
    ratio.add(exact.bfloat16(), exact.bfloat16(), exact.bfloat16().float(), index)
    assert ratio.measured == 0.0
    kept, lost = Ratio(BFLOAT16), Ratio(BFLOAT16)
    kept.add(exact, exact.bfloat16(), exact, index)
    lost.add(exact.bfloat16(), exact, exact, index)  # the reference stays in float32, ours does not
    assert kept.measured == 0.0
    assert lost.value > 50
    assert 0.8 < lost.of_serving < 1.2


def test_one_vast_token_does_not_decide_for_all() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(100, 64, generator=generator)
    ours, narrow = (exact * (1 + 0.004 * torch.randn(100, 64, generator=generator)) for _ in range(2))
    for tensor in (exact, ours, narrow):
        tensor[0] = 1e4  # as of a token that all others attend to, and which is exact
    ratio = Ratio(BFLOAT16)
    ratio.add(ours, narrow.bfloat16(), exact, torch.arange(100))
    assert 0.8 < ratio.measured < 1.1


def test_one_wild_token_is_weighed_down_and_a_broken_one_is_infinite() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(300, 16, generator=generator)
    ours, narrow = (exact + 0.01 * torch.randn(300, 16, generator=generator) for _ in range(2))
    ours[7] += 3.0
    ratio = Ratio(BFLOAT16)
    ratio.add(ours, narrow, exact, torch.arange(300))
    assert ratio.measured < TOO_MUCH
    assert ratio.worst_token == 7
    ours[9, 0] = float("nan")
    ratio.add(ours, narrow, exact, torch.arange(300))
    assert ratio.measured == float("inf")
