"""A bench for people and as a page with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rtp_runtime.readiness.bench.run import BenchReport
from rtp_runtime.readiness.metrics import METRICS, VALID, Point
from rtp_runtime.readiness.render.chart import Series, line_chart
from rtp_runtime.readiness.render.page import render_page
from rtp_runtime.readiness.subject import device_name, machine_name

if TYPE_CHECKING:
    from rich.console import Console

HEADS = ("TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "tokens/s", "memory MiB")
"""Of `METRICS`, in their order."""


def conditions_line(report: BenchReport) -> str:
    """On what, and how often."""
    options = report.options
    return (
        f"{report.dtype} on {device_name(options.device)}, {report.threads} threads; {machine_name()}; "
        f"{options.warmup} warm-up and {options.repeats} repeats of {options.new_tokens} new tokens, "
        f"seed {options.seed}; weights {report.weights_mb:,.1f} MiB"
    )


def cells(point: Point) -> list[str]:
    """The numbers of a point, in the order of `HEADS`."""
    return [f"{point.metrics[name]:,.1f}" if name in point.metrics else "–" for name in METRICS]


def print_bench(report: BenchReport, console: Console) -> None:
    """A table of every point, and what was not measured."""
    from rich.table import Table
    from rich.text import Text

    console.print(Text(report.summary, style="bold"), Text(f"  {report.options.model}", style="dim"), sep="")
    console.print(Text(conditions_line(report), style="dim"))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for head in ("batch", "prompt", *HEADS, "spread"):
        table.add_column(head, justify="right", no_wrap=True)
    for point in report.points:
        style = "" if point.status == VALID else "yellow"
        spread = f"{point.spread['throughput_tok_s']:.0%}" if point.spread else "–"
        row = [str(point.batch), str(point.prompt), *cells(point), spread]
        table.add_row(*(Text(cell, style=style) for cell in row))
    console.print(table)
    for words in report.faults:
        console.print(Text(words, style="yellow"))


def bench_html(report: BenchReport) -> str:
    """The bench as one self-contained page."""
    return render_page(
        "bench.html.j2",
        title=f"rtp bench · {report.options.model}",
        report=report,
        conditions=conditions_line(report),
        charts=charts(report.points),
        heads=HEADS,
        cells=cells,
        metrics=METRICS,
    )


def charts(points: Sequence[Point]) -> list[str]:
    """Throughput, time per token and memory over the batch, time to first token over the prompt. Valid points only."""
    batches = sorted({point.batch for point in points})
    prompts = sorted({point.prompt for point in points})
    valid = [point for point in points if point.status == VALID]

    def by_prompt(metric: str) -> list[Series]:
        return [
            Series(f"prompt {prompt}", {each.batch: each.metrics[metric] for each in valid if each.prompt == prompt})
            for prompt in prompts
        ]

    first = [
        Series(f"batch {batch}", {each.prompt: each.metrics["ttft_ms_p50"] for each in valid if each.batch == batch})
        for batch in batches
    ]
    return [
        line_chart("Throughput", "batch", "output tokens per second", batches, by_prompt("throughput_tok_s")),
        line_chart("Time per output token, median", "batch", "ms", batches, by_prompt("tpot_ms")),
        line_chart("Time to first token, median", "prompt length", "ms", prompts, first),
        line_chart("Memory", "batch", "MiB", batches, by_prompt("memory_mb")),
    ]
