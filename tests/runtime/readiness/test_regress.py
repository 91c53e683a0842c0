"""`rtp regress` on records made by hand: every place that is dropped, anywhere, is named and never green."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evidence import bench_numbers, package, point, record
from hypothesis import given, settings
from hypothesis import strategies as st

from rtp_runtime.errors import RtpError, UsageError
from rtp_runtime.readiness.metrics import INVALID, NOT_RUN, Point
from rtp_runtime.readiness.regress.baselines import Baselines
from rtp_runtime.readiness.regress.cases import Case, CaseFile, read_cases
from rtp_runtime.readiness.regress.process import run_apart
from rtp_runtime.readiness.regress.report import RegressReport
from rtp_runtime.readiness.regress.run import Outcome, run_regress

FILE = """\
schema = 1
baselines = "base"

[hardware]
name = "Two cores"
device = "Chip"

[tolerances]
throughput_tok_s = 0.2

[[cases]]
name = "one"
model = "nowhere/one"
[cases.check]
stages = ["audit", "probes"]
[cases.bench]
batch = [1, 8]
prompt = [64]
new_tokens = 16

[[cases]]
name = "two"
model = "nowhere/two"
kinds = ["bench"]
[cases.bench]
batch = [4]
prompt = [32, 64]
new_tokens = 16
[cases.tolerances]
memory_mb = 0.01
"""
PLACES = [
    ("one", "check", "audit"),
    ("one", "check", "probes"),
    ("one", "bench", "batch 1, prompt 64, 16 new"),
    ("one", "bench", "batch 8, prompt 64, 16 new"),
    ("two", "bench", "batch 4, prompt 32, 16 new"),
    ("two", "bench", "batch 4, prompt 64, 16 new"),
]
Change = Callable[[str, str, Any], Any]
"""(case, place, point or stage) -> what stands there instead, or None."""


def same(case: str, place: str, value: Any) -> Any:
    return value


def ran(change: Change = same, second: int = 0, **changes: Any) -> dict[str, Any]:
    """Runners that give what a quiet machine would, after `change`."""

    def labels(case: Case, cases: CaseFile) -> dict[str, Any]:
        return {"case": case.name, "hardware": cases.hardware.name}

    def bench(case: Case, cases: CaseFile, cache: Path, say: Any) -> Outcome:
        points = [point(batch, prompt) for batch, prompt in case.bench.points]
        kept = [change(case.name, each.name, each) for each in points]
        numbers = bench_numbers(*(each for each in kept if each is not None))
        return Outcome(record("bench", numbers=numbers, settings=labels(case, cases), second=second, **changes))

    def check(case: Case, cases: CaseFile, cache: Path, say: Any) -> Outcome:
        stage = {"status": "MATCH", "measures": 9, "not_judged": ["ranks"]}
        kept = {name: change(case.name, name, stage) for name in case.stages}
        numbers = {"stages": {name: value for name, value in kept.items() if value is not None}}
        return Outcome(record("check", numbers=numbers, settings=labels(case, cases), second=second, **changes))

    return {"check": check, "bench": bench}


@pytest.fixture
def cases(tmp_path: Path) -> CaseFile:
    file = tmp_path / "cases.toml"
    file.write_text(FILE)
    return read_cases(file)


@pytest.fixture
def baseline(cases: CaseFile) -> CaseFile:
    """The case file, with baselines of all places."""
    assert run_regress(cases, runners=ran(), update=True).exit == 0
    return cases


def only(case: str, place: str, new: Any) -> Change:
    """Put something in one place."""
    return lambda where, name, value: new(value) if (where, name) == (case, place) else value


def worse(metric: str, value: float, spread: float = 0.0) -> Callable[[Point], Point]:
    return lambda old: dataclasses.replace(
        old, metrics=dict(old.metrics) | {metric: value}, spread=dict(old.spread) | {metric: spread}
    )


def bad(report: RegressReport) -> dict[tuple[str, str, str], tuple[str, str]]:
    return {
        (item.case, item.kind, item.place): (item.status, "; ".join(item.why))
        for item in report.items
        if item.status != "ok"
    }


def test_all_places_are_expected_and_compared(baseline: CaseFile) -> None:
    report = run_regress(baseline, runners=ran(second=1))
    assert [(item.case, item.kind, item.place) for item in report.items] == PLACES
    assert (report.exit, report.verdict, report.updated) == (0, "within tolerances", ())
    assert report.completeness == "6 of 6 expected places compared"
    assert report.to_json()["missing"] == []


def test_without_baselines_nothing_is_green(cases: CaseFile) -> None:
    report = run_regress(cases, runners=ran())
    assert report.exit == 2
    assert len(bad(report)) == 6
    assert all("no baseline" in why for _, why in bad(report).values())


@pytest.mark.parametrize("place", PLACES)
def test_each_place_dropped_from_the_run(place: tuple[str, str, str], baseline: CaseFile) -> None:
    report = run_regress(baseline, runners=ran(only(place[0], place[2], lambda _: None)))
    assert report.exit == 2
    assert set(bad(report)) == {place}
    assert "it was covered before" in bad(report)[place][1]
    assert " · ".join(place) in report.to_json()["missing"][0]


@pytest.mark.parametrize("place", PLACES)
def test_each_place_dropped_from_the_baseline(place: tuple[str, str, str], cases: CaseFile) -> None:
    store = Baselines.open(cases.baselines, cases.hardware.name).store
    for case in cases.cases:
        for kind in case.kinds:
            runner = ran(only(place[0], place[2], lambda _: None))[kind]
            store.add(runner(case, cases, Path(), None).record)
    report = run_regress(cases, runners=ran(second=1))
    assert report.exit == 2
    assert {key: status for key, (status, _) in bad(report).items()} == {place: "incomplete"}
    assert "the baseline has no such" in bad(report)[place][1]


@pytest.mark.parametrize("place", PLACES)
def test_each_place_dropped_from_the_case_file(place: tuple[str, str, str], baseline: CaseFile, tmp_path: Path) -> None:
    """What ran last time and is asked for no more is named, every time, until the loss is accepted."""
    edits = {
        PLACES[0]: ('["audit", "probes"]', '["probes"]'),
        PLACES[1]: ('["audit", "probes"]', '["audit"]'),
        PLACES[2]: ("[1, 8]", "[8]"),
        PLACES[3]: ("[1, 8]", "[1]"),
        PLACES[4]: ("[32, 64]", "[64]"),
        PLACES[5]: ("[32, 64]", "[32]"),
    }
    file = tmp_path / "cases.toml"
    file.write_text(FILE.replace(*edits[place]))
    fewer = read_cases(file)
    for second in (1, 2):
        report = run_regress(fewer, runners=ran(second=second))
        assert report.exit == 2
        assert set(bad(report)) == {place}
        assert "in no case now" in bad(report)[place][1]
    assert run_regress(fewer, runners=ran(second=3), update=True).exit == 0
    assert run_regress(fewer, runners=ran(second=4)).exit == 0


@pytest.mark.parametrize("kind", ["check", "bench"])
def test_a_run_that_fails_is_named_at_all_its_places(kind: str, baseline: CaseFile) -> None:
    def fails(case: Case, cases: CaseFile, cache: Path, say: Any) -> Outcome:
        raise ZeroDivisionError("a plugin's own fault\nwith details")

    report = run_regress(baseline, runners=ran() | {kind: fails})
    assert report.exit == 2
    assert set(bad(report)) == {place for place in PLACES if place[1] == kind}
    assert all("failed to run: a plugin's own fault" in why for _, why in bad(report).values())


@pytest.mark.parametrize(("status", "metrics"), [(INVALID, None), (NOT_RUN, {})])
def test_invalid_measurements_are_named_and_are_no_baseline(
    status: str, metrics: dict[str, float] | None, baseline: CaseFile
) -> None:
    def spoil(old: Point) -> Point:
        return dataclasses.replace(old, status=status, why="noisy", metrics=old.metrics if metrics is None else metrics)

    place = PLACES[2]
    spoiled = only(place[0], place[2], spoil)
    for update in (False, True):
        report = run_regress(baseline, runners=ran(spoiled, second=5), update=update)
        assert report.exit == 2
        assert f"{status}: noisy" in bad(report)[place][1]
        assert len([file for file in report.updated if Path(file).name.startswith("bench")]) == update  # case two's
    assert run_regress(baseline, runners=ran(second=9)).exit == 0


@pytest.mark.parametrize(
    ("metric", "value", "spread", "exit_status"),
    [
        ("throughput_tok_s", 81.0, 0.0, 0),
        ("throughput_tok_s", 79.0, 0.0, 1),
        ("throughput_tok_s", 500.0, 0.0, 0),
        ("throughput_tok_s", 79.0, 0.25, 2),
        ("throughput_tok_s", 70.0, 0.25, 1),
        ("tpot_ms", 109.0, 0.0, 0),
        ("tpot_ms", 111.0, 0.0, 1),
        ("tpot_ms", 1.0, 0.0, 0),
        ("ttft_ms_p50", 120.0, 0.3, 2),
        ("memory_mb", 109.0, 0.0, 0),
    ],
)
def test_worse_is_told_from_better_and_from_noise(
    metric: str, value: float, spread: float, exit_status: int, baseline: CaseFile
) -> None:
    report = run_regress(baseline, runners=ran(only(PLACES[3][0], PLACES[3][2], worse(metric, value, spread))))
    assert report.exit == exit_status
    if exit_status:
        [(place, (status, why))] = bad(report).items()
        assert place == PLACES[3]
        assert status == {1: "regression", 2: "incomplete"}[exit_status]
        assert why.startswith(f"{metric} {value:.1f}")


def test_repeated_baselines_tell_the_noise_between_runs(baseline: CaseFile) -> None:
    """90, 100 and 130 ms of the same code: 115 is nothing unusual, 150 is; other code repeats nothing."""
    place = PLACES[3]

    def at(value: float) -> Change:
        return only(place[0], place[2], worse("tpot_ms", value))

    assert run_regress(baseline, runners=ran(at(115.0))).exit == 1
    for second, value in ((1, 130.0), (2, 90.0)):
        assert run_regress(baseline, runners=ran(at(value), second=second), update=True).exit == 0
    report = run_regress(baseline, runners=ran(at(115.0), second=3))
    assert report.exit == 2
    assert "within the noise of 40%" in bad(report)[place][1]
    assert run_regress(baseline, runners=ran(at(150.0), second=3)).exit == 1
    other = {"kernel": package("rtp_kernel", "1" * 64), "second": 4}
    assert run_regress(baseline, runners=ran(at(90.0), **other), update=True).exit == 0
    assert run_regress(baseline, runners=ran(at(115.0), second=5)).exit == 1


def test_a_case_has_tolerances_of_its_own(baseline: CaseFile) -> None:
    report = run_regress(baseline, runners=ran(only("two", PLACES[4][2], worse("memory_mb", 102.0))))
    assert report.exit == 1


def test_a_regression_outranks_what_is_missing(baseline: CaseFile) -> None:
    def change(case: str, place: str, value: Any) -> Any:
        return only("two", PLACES[4][2], worse("memory_mb", 200.0))(case, place, value) if case == "two" else None

    report = run_regress(baseline, runners=ran(change))
    assert report.exit == 1
    assert len(report.incomplete) == 4


@pytest.mark.parametrize(
    ("stage", "status"),
    [
        ({"status": "WRONG", "measures": 9, "not_judged": []}, "regression"),
        ({"status": "DRIFT", "measures": 9, "not_judged": []}, "regression"),
        ({"status": "NOT-JUDGED", "measures": 0, "not_judged": ["probes"]}, "incomplete"),
        ({"status": "MATCH", "measures": 8, "not_judged": ["ranks"]}, "incomplete"),
        ({"status": "MATCH", "measures": 9, "not_judged": ["ranks", "experts"]}, "incomplete"),
        ({"status": "MATCH", "measures": 12, "not_judged": []}, "ok"),
    ],
)
def test_stages_of_a_check(stage: dict[str, Any], status: str, baseline: CaseFile) -> None:
    report = run_regress(baseline, runners=ran(only("one", "probes", lambda _: stage)))
    assert bad(report).get(PLACES[1], ("ok",))[0] == status
    updated = run_regress(baseline, runners=ran(only("one", "probes", lambda _: stage), second=5), update=True)
    # A wrong model becomes no baseline, and neither does one that was not judged.
    assert any(Path(file).name.startswith("check") for file in updated.updated) == (stage["status"] == "MATCH")


def test_a_baseline_of_other_conditions_does_not_apply(baseline: CaseFile) -> None:
    for changes, words in (
        ({"dtype": "bfloat16"}, "dtype float32, now bfloat16"),
        ({"seed": 3}, "seed 0, now 3"),
    ):
        report = run_regress(baseline, runners=ran(**changes))
        assert report.exit == 2
        assert all(words in why for _, why in bad(report).values())
    model = dataclasses.replace(record().conditions.model, weights="1" * 64)
    report = run_regress(baseline, runners=ran(model=model))
    assert all("another checkpoint (weights differ)" in why for _, why in bad(report).values())


def test_new_code_is_what_baselines_are_for(baseline: CaseFile) -> None:
    changed = ran(kernel=package("rtp_kernel", "1" * 64), versions={"python": "3", "torch": "9", "transformers": "9"})
    assert run_regress(baseline, runners=changed).exit == 0


def test_damaged_baselines_and_coverage_are_named(baseline: CaseFile) -> None:
    (baseline.baselines / "torn.json").write_text("{")
    report = run_regress(baseline, runners=ran())
    assert (report.exit, len(report.problems)) == (2, 1)
    assert "torn.json" in report.problems[0]
    (baseline.baselines / "torn.json").unlink()
    coverage = Baselines.open(baseline.baselines, baseline.hardware.name).coverage_file
    for text in (b"\xff", b"", b"# other\n", coverage.read_bytes() + b"one line\n"):
        coverage.write_bytes(text)
        report = run_regress(baseline, runners=ran())
        assert report.exit == 2
        assert coverage.name in report.problems[0]
    assert run_regress(baseline, runners=ran(second=2), update=True).exit == 0
    assert run_regress(baseline, runners=ran(second=3)).exit == 0


@given(st.lists(st.sampled_from(range(6)), unique=True, min_size=1), st.booleans())
@settings(max_examples=40, deadline=None)
def test_nothing_missing_is_green(tmp_path_factory: pytest.TempPathFactory, dropped: list[int], update: bool) -> None:
    folder = tmp_path_factory.mktemp("cases")
    (folder / "cases.toml").write_text(FILE)
    cases = read_cases(folder / "cases.toml")
    gone = {(PLACES[each][0], PLACES[each][2]) for each in dropped}

    def change(case: str, place: str, value: Any) -> Any:
        return None if (case, place) in gone else value

    report = run_regress(cases, runners=ran(change), update=update)
    assert report.exit == 2
    assert {PLACES[each] for each in dropped} <= set(bad(report))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'kinds = ["bench"]',
            'kinds = ["bench", "speed"]',
            r"cases.toml:\d+: cases\[1\].kinds\[1\] = 'speed' is unknown",
        ),
        ('kinds = ["bench"]', "kinds = []", "at least one"),
        ("batch = [4]", "batch = 4", r"cases.toml:26: cases\[1\].bench.batch = 4: give a list"),
        ("batch = [4]", "batch = [4, 4]", "twice"),
        ("batch = [4]", "", r"cases\[1\].bench.batch is missing"),
        ("memory_mb = 0.01", "memory = 0.01", r"cases\[1\].tolerances.memory is no key"),
        ('name = "two"', 'name = "one"', "stands twice"),
        ('name = "two"', 'name = "a · b"', "leave them out"),
        ('model = "nowhere/two"', "modle = 1", "'modle' is no key that is known, did you mean 'model'"),
        ('["audit", "probes"]', '["audits"]', "'audits' is unknown"),
        ('kinds = ["bench"]', 'kinds = ["check"]', '"bench" is not among the kinds'),
        ("schema = 1", "schema = 3", "schema = 3 is unknown"),
        ("new_tokens = 16\n\n", "new_tokens = 1\n\n", "give 2 or more"),
        ('[hardware]\nname = "Two cores"\ndevice = "Chip"', "", "hardware is missing"),
    ],
)
def test_bad_case_files_are_refused_with_their_place(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in FILE
    file = tmp_path / "cases.toml"
    file.write_text(FILE.replace(old, new, 1))
    with pytest.raises(UsageError, match=message):
        read_cases(file)


def test_other_hardware_runs_nothing(cases: CaseFile) -> None:
    with pytest.raises(UsageError, match="this machine is not 'Two cores'"):
        run_regress(cases)


def test_a_process_that_dies_is_a_finding() -> None:
    import os
    import signal

    def said(message: str) -> None:
        raise AssertionError(message)

    with pytest.raises(RtpError, match="killed by SIGKILL"):
        run_apart(_die, os.getpid(), signal.SIGKILL, say=said)


def _die(parent: int, number: int, say: Any) -> None:
    import os

    assert os.getpid() != parent
    os.kill(os.getpid(), number)
