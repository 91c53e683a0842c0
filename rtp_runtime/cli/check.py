"""`rtp check`: is what our runtime computes what the model's authors meant? The Hugging Face model is the reference."""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtp_runtime.cli.evidence_options import add_record_options, keep_record, open_recorder
from rtp_runtime.cli.results import ProgressLine, check_output_file, show_results
from rtp_runtime.errors import UsageError

if TYPE_CHECKING:
    from rtp_runtime.check import CheckOptions

SUMMARY = "correctness against the Hugging Face reference; exit 0 pass, 1 fail, 2 could not judge"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `rtp check`."""
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory, hub id, or with --random a bare config")
    parser.add_argument(
        "--reference", metavar="OTHER", help="compare with the reference's run of this checkpoint instead"
    )
    parser.add_argument("--json", action="store_true", help="one object on stdout and nothing else there")
    parser.add_argument("--schema", action=_PrintSchema, nargs=0, help="print the JSON Schema of --json, and stop")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write a self-contained report")
    parser.add_argument("--dtype", default="auto", help="serving dtype in which pinned tensors are compared (auto)")
    parser.add_argument("--stages", metavar="A,B", help="only these stages: audit,text,pinned,probes,…,serving")
    parser.add_argument("--skip", metavar="A,B", help="all stages but these; what is left out is not judged")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="add a text to the prompts")
    parser.add_argument("--seed", type=int, default=0, help="of drawn prompts and weights (0)")
    parser.add_argument("--random", action="store_true", help="draw random weights; a config alone is enough")
    parser.add_argument(
        "--layers", metavar="WHICH", help='only these layers: 4 (the first four), 0-3,27, or "kinds" (one of each kind)'
    )
    parser.add_argument("--experts", type=int, metavar="N", help="keep N routed experts of each layer")
    add_record_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the check, print its report, and return its exit status."""
    from rtp_runtime.check import run_check
    from rtp_runtime.check.render.html import render_html
    from rtp_runtime.check.render.terminal import print_report

    options = _options(args)
    check_output_file(args.html, "--html")
    with ProgressLine() as line:
        recorder = open_recorder(args, line)
        report = run_check(options, progress=line)
    show_results(
        args,
        page=lambda: render_html(report),
        values=report.to_json,
        show=lambda console: print_report(report, console),
    )
    if recorder is not None:
        from rtp_runtime.readiness.recording import keep_check

        keep_record(lambda: keep_check(recorder, report, options))
    return report.exit


def _options(args: argparse.Namespace) -> CheckOptions:
    from rtp_runtime.check import STAGES, CheckOptions

    if args.stages and args.skip:
        raise UsageError(f"--stages {args.stages} and --skip {args.skip} contradict each other: give one of them")
    skipped = _names(args.skip)
    unknown = [name for name in skipped if name not in STAGES]
    if unknown:
        raise UsageError(f"--skip {unknown[0]!r} is no stage: the stages are {', '.join(STAGES)}")
    return CheckOptions(
        model=_place(args.model, args.random),
        reference=_place(args.reference, args.random) if args.reference else None,
        dtype=args.dtype,
        stages=_names(args.stages) if args.stages else tuple(name for name in STAGES if name not in skipped),
        prompts=tuple(args.prompt),
        plugins=tuple(args.plugin),
        seed=args.seed,
        random=args.random,
        layers=args.layers,
        experts=args.experts,
    )


def _place(model: str, random: bool) -> Path:
    """A directory, which a hub id is downloaded to (for random weights, all but weights), or the file of a config."""
    from rtp_runtime.model.checkpoint import PATTERNS, resolve_checkpoint

    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".json":
        return path
    return resolve_checkpoint(model, [pattern for pattern in PATTERNS if not random or pattern != "*.safetensors"])


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


class _PrintSchema(argparse.Action):
    """Print the schema of the JSON report instead of checking anything."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        schema = resources.files("rtp_runtime.check").joinpath("report.schema.json")
        print(schema.read_text(encoding="utf-8"), end="")
        parser.exit()
