"""`rtp bench`: time to first token, time per output token, throughput and memory of a model, in this process."""

from __future__ import annotations

import argparse
from pathlib import Path

from rtp_runtime.cli.evidence_options import add_record_options, keep_record, open_recorder
from rtp_runtime.cli.model_options import add_model_options
from rtp_runtime.cli.results import ProgressLine, check_output_file, show_results
from rtp_runtime.errors import UsageError
from rtp_runtime.readiness.bench.options import BenchOptions

SUMMARY = "time to first token, time per token, throughput and memory over batches and prompt lengths"

EXIT_INCOMPLETE = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `rtp bench`."""
    add_model_options(parser)
    group = parser.add_argument_group("points")
    group.add_argument("--batch", metavar="N,N", default="1,8,32", help="requests at once (1,8,32)")
    group.add_argument("--prompt", metavar="N,N", default="128,512", help="tokens of each prompt (128,512)")
    group.add_argument("--new-tokens", metavar="N", type=int, default=48, help="output tokens of each request (48)")
    group.add_argument("--warmup", metavar="N", type=int, default=1, help="runs of a point before those that count (1)")
    group.add_argument("--repeats", metavar="N", type=int, default=5, help="runs of a point that count (5)")
    group.add_argument(
        "--max-spread", metavar="X", type=float, default=0.25, help="a point that varies more is invalid (0.25)"
    )
    group.add_argument("--seed", type=int, default=0, help="of the drawn prompts (0)")
    parser.add_argument("--json", action="store_true", help="one object on stdout and nothing else there")
    parser.add_argument("--html", metavar="FILE", type=Path, help="also write a self-contained page with pictures")
    add_record_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure every point; exit status 0, or 2 when a point was not measured."""
    from rtp_runtime.plugins import load_plugins
    from rtp_runtime.readiness.bench.run import run_bench
    from rtp_runtime.readiness.recording import keep_bench
    from rtp_runtime.readiness.render.bench import bench_html, print_bench

    options = _options(args)
    check_output_file(args.html, "--html")
    with ProgressLine() as line:
        recorder = open_recorder(args, line)
        report = run_bench(options, load_plugins(args.plugin), line)
    show_results(
        args,
        page=lambda: bench_html(report),
        values=report.to_json,
        show=lambda console: print_bench(report, console),
    )
    if recorder is not None:
        keep_record(lambda: keep_bench(recorder, report))
    return EXIT_INCOMPLETE if report.faults else 0


def _options(args: argparse.Namespace) -> BenchOptions:
    return BenchOptions(
        model=args.model,
        batches=_numbers("--batch", args.batch),
        prompts=_numbers("--prompt", args.prompt),
        new_tokens=args.new_tokens,
        warmup=args.warmup,
        repeats=args.repeats,
        max_spread=args.max_spread,
        dtype=args.dtype,
        device=args.device,
        deterministic=args.deterministic,
        seed=args.seed,
        max_model_len=args.max_model_len,
        trust_remote_code=args.trust_remote_code,
    )


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{option} {text!r}: give numbers separated by commas, such as 1,8,32") from None
