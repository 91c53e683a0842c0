"""The arguments by which `rtp check`, `rtp bench` and `rtp readiness` find evidence."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rtp_runtime.cli.output import say
from rtp_runtime.errors import RtpError

if TYPE_CHECKING:
    from rtp_runtime.readiness.checkpoint import Progress
    from rtp_runtime.readiness.recording import Recorder


def add_evidence_option(parser: argparse.ArgumentParser) -> None:
    """Where evidence is kept."""
    parser.add_argument(
        "--evidence",
        metavar="DIR",
        type=Path,
        help="directory of evidence (RTP_EVIDENCE, or .rtp/evidence under the working directory)",
    )


def add_record_options(parser: argparse.ArgumentParser) -> None:
    """Whether the result is recorded as evidence, and where."""
    group = parser.add_argument_group("evidence")
    add_evidence_option(group)  # type: ignore[arg-type]  # a group adds arguments as a parser does
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--record",
        action="store_true",
        default=None,
        help="record the result as evidence (default: if --evidence or RTP_EVIDENCE is given or .rtp/evidence exists)",
    )
    choice.add_argument("--no-record", dest="record", action="store_false", help="record nothing")


def open_recorder(args: argparse.Namespace, progress: Progress | None = None) -> Recorder | None:
    """What records the result of a run that begins now, as the arguments of `add_record_options` say."""
    from rtp_runtime.plugins import load_plugins
    from rtp_runtime.readiness.recording import Recorder

    return Recorder.open(
        args.model, load_plugins(args.plugin), evidence=args.evidence, wanted=args.record, progress=progress
    )


def keep_record(write: Callable[[], Path]) -> None:
    """Write a record and say where. A result that could not be recorded stands all the same, and so does its status."""
    try:
        say(f"recorded {write()}")
    except RtpError as error:
        say(f"warning: {error}")
