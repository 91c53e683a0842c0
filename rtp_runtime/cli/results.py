"""How commands that judge show what they found: progress meanwhile, then a page, and a JSON object or words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtp_runtime.cli.output import print_json, say
from rtp_runtime.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console


def check_output_file(file: Path | None, option: str) -> None:
    """
    Raises:
        UsageError: the directory of a file that will be written does not exist.
    """
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"{option} {file}: there is no directory {file.parent}; create it or write elsewhere")


class ProgressLine:
    """One line of progress on a terminal, rewritten in place and gone in the end; nothing where stderr is none."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self._write("")

    def __call__(self, message: str) -> None:
        self._write(f"{message} …")

    def _write(self, text: str) -> None:
        if self._shown:
            sys.stderr.write(f"\r\x1b[2K{text}")
            sys.stderr.flush()


def show_results(
    args: argparse.Namespace,
    *,
    page: Callable[[], str],
    values: Callable[[], Mapping[str, Any]],
    show: Callable[[Console], None],
) -> None:
    """Write the page of `--html`, then print the one object of `--json`, or `show` the same to people."""
    if args.html is not None:
        args.html.write_text(page(), encoding="utf-8")
        say(f"wrote {args.html}")
    if args.json:
        print_json(values())
    else:
        from rich.console import Console

        show(Console(width=None if sys.stdout.isatty() else 140))
