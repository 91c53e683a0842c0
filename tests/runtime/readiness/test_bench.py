"""A bench counts what it was asked for, its numbers follow from a clock that we hold, and nothing is left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rtp_runtime.errors import UsageError
from rtp_runtime.plugins import load_plugins
from rtp_runtime.readiness.bench.options import BenchOptions
from rtp_runtime.readiness.bench.remaining import Remaining
from rtp_runtime.readiness.bench.run import BenchReport, draw_prompts, run_bench
from rtp_runtime.readiness.metrics import INVALID, METRICS, NOT_RUN, VALID, percentile, read_points, spread_of

Clock = Callable[[], float]


def ticking() -> Clock:
    """One second passes between any two looks."""
    return itertools.count().__next__


def bench(model: Path, clock: Clock, **changes: object) -> BenchReport:
    options: dict[str, object] = {
        "model": str(model), "batches": (1, 3), "prompts": (5, 9), "new_tokens": 4, "repeats": 3, "dtype": "float32"
    }  # fmt: skip
    return run_bench(BenchOptions(**(options | changes)), load_plugins(), clock=clock)  # type: ignore[arg-type]


def test_numbers_follow_from_tokens_and_time(tiny: Path) -> None:
    report = bench(tiny, ticking())
    assert [point.key for point in report.points] == [(1, 5, 4), (1, 9, 4), (3, 5, 4), (3, 9, 4)]
    for point in report.points:
        # A look at the clock before, one after each of the 4 steps, one at the end: tokens come at 1, 2, 3 and 4.
        assert point.status == VALID, point.why
        assert point.metrics["ttft_ms_p50"] == point.metrics["ttft_ms_p99"] == 1000.0
        assert point.metrics["tpot_ms"] == point.metrics["tpot_ms_p99"] == 1000.0
        assert point.metrics["throughput_tok_s"] == pytest.approx(point.batch * 4 / 5)
        assert point.metrics["memory_mb"] > 10.0
        assert point.repeats == 3 and not any(point.spread.values())
    assert (report.result, report.faults) == ("pass", [])
    assert read_points(report.numbers(), "f") == list(report.points)
    assert report.to_json()["settings"]["batches"] == [1, 3]


def test_a_prompt_in_several_steps_delays_the_first_token(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rtp_runtime.engine.config import EngineConfig

    monkeypatch.setattr(EngineConfig.__init__, "__kwdefaults__", EngineConfig.__init__.__kwdefaults__ | {
        "max_chunk_tokens": 3
    })  # fmt: skip
    [point] = bench(tiny, ticking(), batches=(1,), prompts=(9,)).points
    assert point.metrics["ttft_ms_p50"] == 3000.0
    assert point.metrics["throughput_tok_s"] == pytest.approx(4 / 7, abs=1e-3)
    assert "9 prompt tokens in 3 steps" in point.notes[0]


def test_a_clock_that_stands_measures_nothing(tiny: Path) -> None:
    report = bench(tiny, lambda: 7.0, batches=(1,), prompts=(5,))
    assert [point.status for point in report.points] == [INVALID]
    assert "duration of zero" in report.points[0].why
    assert report.result == "fail"


def test_a_machine_that_is_not_quiet_is_named(tiny: Path) -> None:
    looks = itertools.count()

    def clock() -> float:
        """Each run takes twice as long as the one before."""
        look = next(looks)
        run, place = divmod(look, 6)
        return float(2**run * (6 + place))

    [point] = bench(tiny, clock, batches=(1,), prompts=(5,), warmup=0).points
    assert point.status == INVALID
    assert "spread" in point.why and "not quiet" in point.why


def test_too_few_repeats_are_named(tiny: Path) -> None:
    [point] = bench(tiny, ticking(), batches=(1,), prompts=(5,), repeats=2).points
    assert (point.status, point.why[:15]) == (INVALID, "too few samples")


def test_what_does_not_fit_is_named_and_the_rest_is_measured(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rtp_runtime.engine import admission

    report = bench(tiny, ticking(), batches=(1,), prompts=(5, 100_000))
    assert [point.status for point in report.points] == [VALID, NOT_RUN]
    assert "context" in report.points[1].why
    assert report.result == "partial"
    assert report.faults == [f"batch 1, prompt 100000, 4 new: not run: {report.points[1].why}"]
    monkeypatch.setattr(admission, "free_memory", lambda device: 2**19)
    report = bench(tiny, ticking(), batches=(1, 64), prompts=(40,))
    assert [point.status for point in report.points] == [VALID, NOT_RUN]
    assert "needs 192 paged blocks" in report.points[1].why


def test_prompts_are_drawn_anew_for_each_request_and_again_for_each_seed() -> None:
    one = draw_prompts(4, 16, 1000, seed=0)
    assert one == draw_prompts(4, 16, 1000, seed=0)
    assert len({tuple(prompt) for prompt in [*one, *draw_prompts(4, 16, 1000, seed=1)]}) == 8
    assert all(0 <= token < 1000 for prompt in one for token in prompt)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=60), st.sampled_from([0.01, 0.5, 0.99, 1.0]))
@settings(max_examples=60, deadline=None)
def test_percentiles_and_spread_are_numpys(values: list[float], share: float) -> None:
    assert percentile(values, share) == np.quantile(values, share, method="inverted_cdf")
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    assert spread_of(values) == pytest.approx((high - low) / middle if len(values) > 1 else 0.0)


def test_the_time_that_is_left() -> None:
    remaining = Remaining(BenchOptions(model="m", batches=(1,), prompts=(2, 8), new_tokens=2, warmup=0, repeats=3))
    assert remaining.words() == ""
    remaining.done(1, 2, 40.0)
    # Two more of 40 s, and three of 10 tokens at 10 s each.
    assert remaining.seconds() == pytest.approx(2 * 40 + 3 * 100)
    assert remaining.words() == ", 6:20 left"
    remaining.skip(1, 8)
    assert remaining.seconds() == pytest.approx(80)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": ()}, "batch"),
        ({"batches": (0,)}, "batch"),
        ({"prompts": (8, 8)}, "twice"),
        ({"new_tokens": 1}, "new_tokens=1"),
        ({"repeats": 0}, "repeats=0"),
        ({"max_spread": 0.0}, "max_spread"),
    ],
)
def test_bad_options(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BenchOptions(**({"model": "m"} | changes))  # type: ignore[arg-type]


def test_metrics_know_which_way_is_worse() -> None:
    assert METRICS["throughput_tok_s"].worse_by(90.0, 100.0) == pytest.approx(0.1)
    assert METRICS["ttft_ms_p50"].worse_by(90.0, 100.0) == pytest.approx(-0.1)
