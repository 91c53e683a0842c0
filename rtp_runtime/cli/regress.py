"""`rtp regress`: run a case file, compare with baselines, and name everything that is missing."""

from __future__ import annotations

import argparse
from pathlib import Path

from rtp_runtime.cli.results import ProgressLine, check_output_file, show_results

SUMMARY = "a case file against its baselines; exit 0 complete and no worse, 1 worse, 2 something is missing"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `rtp regress`."""
    parser.add_argument("file", metavar="FILE", type=Path, help="the case file (TOML)")
    parser.add_argument("--update", action="store_true", help="make what was measured the new baselines")
    parser.add_argument("--json", action="store_true", help="one object on stdout and nothing else there")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write a self-contained page")


def run(args: argparse.Namespace) -> int:
    """Run every case; exit status 0 only if everything expected was compared and nothing is worse."""
    from dataclasses import replace

    from rtp_runtime.readiness.regress.cases import read_cases
    from rtp_runtime.readiness.regress.run import run_regress
    from rtp_runtime.readiness.render.regress import print_regress, regress_html

    check_output_file(args.html, "--html")
    cases = read_cases(args.file)
    extra = tuple(args.plugin)
    cases = replace(cases, cases=tuple(replace(case, plugins=(*case.plugins, *extra)) for case in cases.cases))
    with ProgressLine() as line:
        report = run_regress(cases, update=args.update, progress=line)
    show_results(
        args,
        page=lambda: regress_html(report),
        values=report.to_json,
        show=lambda console: print_regress(report, console),
    )
    return report.exit
