"""`rtp readiness`: how far a model has come, on which evidence, what has gone stale, and what comes next."""

from __future__ import annotations

import argparse
from pathlib import Path

from rtp_runtime.cli.evidence_options import add_evidence_option
from rtp_runtime.cli.results import ProgressLine, check_output_file, show_results
from rtp_runtime.readiness.ladder import STATES

SUMMARY = "how far a model has come: recorded evidence, what is stale and why, what comes next"

EXIT_NOT_REACHED = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `rtp readiness`."""
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory, or hub id")
    parser.add_argument("--json", action="store_true", help="one object on stdout and nothing else there")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write a self-contained page")
    parser.add_argument(
        "--targets", metavar="FILE", type=Path, help="targets of performance-ready (.rtp/targets.toml if it exists)"
    )
    parser.add_argument("--require", metavar="STATE", choices=STATES, help=f"exit 1 below it: {', '.join(STATES)}")
    add_evidence_option(parser)


def run(args: argparse.Namespace) -> int:
    """Show the ladder; exit status 1 when the required state is not reached."""
    from rtp_runtime.plugins import load_plugins
    from rtp_runtime.readiness import assess
    from rtp_runtime.readiness.render.ladder import ladder_html, ladder_json, print_ladder

    check_output_file(args.html, "--html")
    with ProgressLine() as line:
        ladder = assess(
            args.model,
            evidence=args.evidence,
            targets=args.targets,
            plugins=load_plugins(args.plugin),
            progress=line,
        )
    asked = (args.model, ladder, args.require)
    show_results(
        args,
        page=lambda: ladder_html(*asked),
        values=lambda: ladder_json(*asked),
        show=lambda console: print_ladder(*asked, console),
    )
    return 0 if args.require is None or ladder.has(args.require) else EXIT_NOT_REACHED
