"""Running a case file: every case, its baseline, coverage against earlier runs, and, when asked, new baselines."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rtp_runtime.errors import UsageError
from rtp_runtime.readiness.content import Content
from rtp_runtime.readiness.record import Record
from rtp_runtime.readiness.recording import conditions_of_bench, conditions_of_check, judge_check, make_record
from rtp_runtime.readiness.regress.baselines import Baselines
from rtp_runtime.readiness.regress.cases import Case, CaseFile
from rtp_runtime.readiness.regress.compare import compare, not_run, passed
from rtp_runtime.readiness.regress.process import run_apart
from rtp_runtime.readiness.regress.report import INCOMPLETE, Item, RegressReport
from rtp_runtime.readiness.subject import Subject, device_name, gather_subject, machine_name

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What running one kind of one case gave."""

    record: Record
    contents: tuple[Content, ...] = ()
    """The files behind its digests, for a baseline."""


Runner = Callable[[Case, CaseFile, Path, Progress], Outcome]
"""Runs one kind of a case; the path is where digests of weights are kept."""


def run_regress(
    cases: CaseFile,
    *,
    update: bool = False,
    progress: Progress | None = None,
    runners: Mapping[str, Runner] | None = None,
) -> RegressReport:
    """Run every case and compare it with its baseline; with `update`, make what ran the new baselines.

    Raises:
        UsageError: this machine is not the hardware of the file, or a directory cannot be written.
    """
    started = time.monotonic()
    say = progress or (lambda message: None)
    if runners is None:
        _check_hardware(cases)
        runners = {"check": _apart(run_check_case), "bench": _apart(run_bench_case)}
    baselines = Baselines.open(cases.baselines, cases.hardware.name)
    items: list[Item] = []
    updated: list[str] = []
    for number, case in enumerate(cases.cases):
        for kind in case.kinds:
            prefix = f"{case.name} ({number + 1} of {len(cases.cases)}), {kind}: "
            say_here = functools.partial(_say_after, prefix, say)
            found, file = _one(case, kind, cases, baselines, runners[kind], update, say_here)
            items += found
            updated += [file] if file else []
    items, problems = _with_coverage(items, baselines, update)
    return RegressReport(
        file=cases.file,
        hardware=cases.hardware.name,
        items=tuple(items),
        problems=tuple(baselines.problems + problems),
        updated=tuple(updated),
        seconds=time.monotonic() - started,
    )


def _apart(runner: Runner) -> Runner:
    """The runner in a process of its own."""

    def run(case: Case, cases: CaseFile, cache: Path, say: Progress) -> Outcome:
        outcome: Outcome = run_apart(runner, case, cases, cache, say=say)
        return outcome

    return run


def _say_after(prefix: str, say: Progress, message: str) -> None:
    say(prefix + message)


def _one(
    case: Case, kind: str, cases: CaseFile, baselines: Baselines, runner: Runner, update: bool, say: Progress
) -> tuple[list[Item], str]:
    """The places of one kind of one case, and the baseline that was written for it."""
    try:
        outcome = runner(case, cases, baselines.store.cache, say)
    except Exception as error:  # whatever a plugin or torch raises: the case did not run, and that is the finding
        words = (str(error) or type(error).__name__).splitlines()[0]
        return not_run(case, kind, words), ""
    items = compare(case, kind, outcome.record, baselines.find(case.name, kind), cases.hardware)
    if not update or not passed(outcome.record, items):
        return items, ""
    file = baselines.store.add(outcome.record, outcome.contents)
    return [replace(item, status="ok", why=(), changes=()) for item in items], str(file)


def _with_coverage(items: list[Item], baselines: Baselines, update: bool) -> tuple[list[Item], list[str]]:
    """Name what was covered before and is missing now, and remember what is covered."""
    measured = {item.name for item in items if item.measured}
    try:
        before = baselines.covered()
    except UsageError as error:
        if update and len(measured) == len(items):
            baselines.write_covered(measured)
            return items, []
        return items, [str(error)]
    complete = len(measured) == len(items)
    if update and complete:
        baselines.write_covered(measured)
        return items, []
    known = {item.name: place for place, item in enumerate(items)}
    for name in sorted(before - measured):
        if name in known:
            item = items[known[name]]
            items[known[name]] = replace(item, status=_not_green(item), why=(*item.why, "it was covered before"))
        else:
            case, kind, place = name.split(" · ")
            why = ("it was covered before and is in no case now: put it back, or accept its loss with --update",)
            items.append(Item(case=case, kind=kind, place=place, status=INCOMPLETE, why=why, measured=False))
    if measured - before:
        baselines.write_covered(before | measured)
    return items, []


def _not_green(item: Item) -> str:
    return INCOMPLETE if item.status == "ok" else item.status


def _check_hardware(cases: CaseFile) -> None:
    hardware = cases.hardware
    for case in (case for case in cases.cases if "bench" in case.kinds):  # a check runs on any processor
        device, machine = device_name(case.device), machine_name()
        if not hardware.fits(device, machine):
            raise UsageError(
                f"{cases.file}: this machine is not {hardware.name!r}: case {case.name!r} would run on {device!r} of "
                f"{machine!r}, and the profile is device {hardware.device!r}, machine {hardware.machine!r}; "
                "run it there, or write a case file for this hardware"
            )


def run_check_case(case: Case, cases: CaseFile, cache: Path, say: Progress) -> Outcome:
    """Run `rtp check` as a case asks."""
    from rtp_runtime.check import STAGES, CheckOptions, run_check
    from rtp_runtime.model import resolve_checkpoint
    from rtp_runtime.plugins import load_plugins

    options = CheckOptions(
        model=resolve_checkpoint(case.model),
        dtype=case.dtype,
        stages=case.stages or STAGES,
        plugins=case.plugins,
        seed=case.seed,
        explain=False,
    )
    subject = gather_subject(case.model, load_plugins(case.plugins), cache, say)
    report = run_check(options, progress=say)
    return _outcome("check", judge_check(report, options), conditions_of_check(report, options), subject, case, cases)


def run_bench_case(case: Case, cases: CaseFile, cache: Path, say: Progress) -> Outcome:
    """Run `rtp bench` as a case asks."""
    from rtp_runtime.plugins import load_plugins
    from rtp_runtime.readiness.bench.run import run_bench

    plugins = load_plugins(case.plugins)
    subject = gather_subject(case.model, plugins, cache, say)
    report = run_bench(case.bench, plugins, say)
    judged = (report.result, report.summary, report.numbers())
    return _outcome("bench", judged, conditions_of_bench(report), subject, case, cases)


def _outcome(
    kind: str,
    judged: tuple[str, str, dict[str, Any]],
    conditions: dict[str, Any],
    subject: Subject,
    case: Case,
    cases: CaseFile,
) -> Outcome:
    """The record as `rtp check` or `rtp bench` would keep it, labelled with its case and hardware profile."""
    labels = {"case": case.name, "hardware": cases.hardware.name}
    settled = subject.conditions(**conditions | {"settings": conditions["settings"] | labels})
    result, summary, numbers = judged
    return Outcome(make_record(kind, result, summary, settled, numbers), tuple(subject.contents))
