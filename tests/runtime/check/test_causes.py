"""The cause of a difference: named where a mistake explains it, and never otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from check_faults.catalogue import Fault
from check_faults.everything import ALL
from check_faults.scoring import LENGTHS, Score, judge, placed, stages_for
from check_faults.unknown import UNKNOWN
from torch import Tensor

from rtp_runtime.alternatives import NormForm, describe_order, packings, pair_packings, turned
from rtp_runtime.check import CheckReport, run_check
from rtp_runtime.check.capture import Call, Capture
from rtp_runtime.check.causes.evidence import Evidence, Kept
from rtp_runtime.check.causes.judge import Match, compare
from rtp_runtime.check.probe_table import ProbeKey
from rtp_runtime.check.reference import Reference

NAMED = (
    "qkv_order", "interleaved_rotary", "tiled_heads", "norm_plus_one", "key_norm_eps", "activation", "embedding_scale",
    "not_renormalised", "zeroed_bias", "theta", "tie_flag",
)  # fmt: skip
"""A part of the seeded faults, one of each kind of mistake, that runs in a few seconds."""
KEY = ProbeKey("layer.module")


@pytest.fixture
def explained(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Reference], tmp_path: Path
) -> Callable[[str], tuple[Score, CheckReport]]:
    """The score and the report of a seeded fault."""
    faults = {fault.name: fault for fault in ALL}

    def run(name: str) -> tuple[Score, CheckReport]:
        fault = faults[name]
        with placed(fault, checkpoint(fault.base), tmp_path / "fault") as entered:
            report = run_check(entered.options(stages_for(fault), LENGTHS), reference=reference(fault.base))
        return judge(fault, 0, report), report

    return run


@pytest.mark.parametrize("name", NAMED)
def test_cause_is_named(name: str, explained: Callable[[str], tuple[Score, CheckReport]]) -> None:
    score, report = explained(name)
    assert report.cause is not None and report.cause.status == "named"
    assert score.cause == score.fault.cause, report.cause
    assert report.cause.words and report.cause.fix


@pytest.mark.parametrize("fault", UNKNOWN[:2], ids=lambda fault: fault.name)
def test_what_no_mistake_explains_is_not_named(
    fault: Fault, explained: Callable[[str], tuple[Score, CheckReport]]
) -> None:
    score, report = explained(fault.name)
    assert score.flagged and score.placed
    assert report.cause is not None and report.cause.status in ("unknown", "closest")
    assert report.cause.words


def test_no_cause_is_sought_where_all_agree(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    from rtp_runtime.check import CheckOptions

    options = CheckOptions(model=checkpoint("qwen3"), stages=("audit", "probes"), lengths=(14,), num_new_tokens=2)
    assert run_check(options, reference=reference("qwen3")).cause is None


# The matched filter itself


def match(error: Tensor, effect: Tensor, allowed: float = 2e-6) -> Match:
    """Of an error and a mistake's effect, [tokens, features] each, on a reference of ones' size."""
    right = torch.randn(error.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    index = torch.arange(len(error))
    kept = Kept([((right.double() + error.double()).float(),)], [index])

    def captured(values: Tensor) -> Capture:
        return Capture(len(error), calls={KEY.module: Call((), (values,))})

    mistaken = captured((right.double() + effect.double()).float())
    found = compare(Evidence({KEY: kept}, {}), KEY, captured(right), mistaken, 0, allowed)
    assert found is not None
    return found


def draw(seed: int, size: float) -> Tensor:
    values = torch.randn(64, 48, generator=torch.Generator().manual_seed(seed))
    return size * values / values.square().mean().sqrt()


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 1e-5])
def test_an_error_that_is_the_effect_is_named(size: float) -> None:
    found = match(draw(1, size), draw(1, size))
    assert found.exact and found.names() and found.coefficient == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 1e-5])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.8, 1.3, -1.0])
def test_a_share_of_the_effect_or_none_is_not_named(size: float, share: float) -> None:
    """Rounding and other mistakes have no part, or another one, in a mistake's direction."""
    other = draw(2, size)
    found = match(share * draw(1, size) + (other if share == 0.0 else 0.0), draw(1, size))
    assert not found.names(rounding=True)


@pytest.mark.parametrize("more", [0.03, 0.2, 0.6])
def test_a_second_error_beside_it_is_told_apart(more: float) -> None:
    """With a little beside it the coefficient names it; with much beside it nothing is named."""
    found = match(draw(1, 1e-3) + draw(2, more * 1e-3), draw(1, 1e-3))
    assert found.names() == (more < 0.05) and found.names(rounding=True) == (more < 0.35) and not found.exact


def test_an_error_of_clean_runs_is_not_named() -> None:
    """Rounding of 6e-7, which is below every tolerance, against mistakes of any size."""
    for seed, size in enumerate((1e-6, 1e-5, 1e-3, 1.0)):
        found = match(draw(9, 6e-7), draw(seed, size))
        assert not found.names() or found.effect <= 1e-6


def test_an_effect_below_the_noise_is_not_judged() -> None:
    assert not match(draw(1, 1e-3), draw(2, 1e-7)).judged
    assert match(draw(1, 1e-3), draw(2, 1e-5)).judged


# The alternatives


def test_packings_hold_every_row_once() -> None:
    for heads, kv_heads, dim in ((4, 2, 6), (3, 3, 4), (8, 1, 2)):
        found = list(packings(heads, kv_heads, dim))
        rows = (heads + 2 * kv_heads) * dim
        assert torch.equal(found[0].order, torch.arange(rows))
        for packing in found:
            assert torch.equal(packing.order[packing.inverse], torch.arange(rows)), packing.name
    assert len({tuple(packing.order.tolist()) for packing in pair_packings(8, heads=2)}) == 5


def test_orders_are_told_in_words() -> None:
    rows = torch.arange(12)
    assert describe_order(rows.flip(0).tolist()) == "reversed"
    assert describe_order(rows.roll(3).tolist()) == "rolled by 3"
    assert describe_order(rows.roll(6).tolist()) == "halves exchanged"
    assert "interleaved" in describe_order(rows.view(2, 6).T.flatten().tolist())
    assert describe_order(torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()) == ""


def test_norms_are_those_of_torch() -> None:
    x, weight, bias = draw(1, 2.0), draw(2, 1.0)[0], draw(3, 1.0)[0]
    rms = torch.nn.functional.rms_norm(x, (48,), weight, 1e-5)
    layer = torch.nn.functional.layer_norm(x, (48,), weight, bias, 1e-5)
    torch.testing.assert_close(NormForm(eps=1e-5).apply(x, weight), rms)
    torch.testing.assert_close(NormForm(eps=1e-5, centred=True).apply(x, weight, bias), layer)


def test_turning_back_undoes_a_turn() -> None:
    x, angles = draw(1, 1.0).view(64, 3, 16), draw(2, 1.0)[:, :4]
    for layout in ("half", "interleaved"):
        for at_end in (False, True):
            there = turned(x, angles.cos(), angles.sin(), layout, at_end)
            torch.testing.assert_close(turned(there, angles.cos(), -angles.sin(), layout, at_end), x)
