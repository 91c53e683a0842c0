"""`rtp readiness`: how far a model has come, on which evidence, what has gone stale, and what comes next."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rtp_runtime.cli.evidence_options import ProgressLine, add_evidence_option, check_output_file
from rtp_runtime.cli.output import print_json, say
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
    line = ProgressLine()
    try:
        ladder = assess(
            args.model,
            evidence=args.evidence,
            targets=args.targets,
            plugins=load_plugins(args.plugin),
            progress=line,
        )
    finally:
        line.clear()
    if args.html is not None:
        args.html.write_text(ladder_html(args.model, ladder, args.require), encoding="utf-8")
        say(f"wrote {args.html}")
    if args.json:
        print_json(ladder_json(args.model, ladder, args.require))
    else:
        from rich.console import Console

        print_ladder(args.model, ladder, args.require, Console(width=None if sys.stdout.isatty() else 140))
    return 0 if args.require is None or ladder.has(args.require) else EXIT_NOT_REACHED
