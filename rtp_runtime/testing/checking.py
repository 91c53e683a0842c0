"""`rtp check` as an assertion: a failure says verdict, module and cause, and leaves the report beside it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rtp_runtime.check import CheckOptions, CheckReport

MAX_SHOWN = 5


class CheckFailedError(AssertionError):
    """A check whose exit status is not 0. `report` is the whole of it, `page` where its HTML was written."""

    def __init__(self, report: CheckReport, page: Path | None) -> None:
        super().__init__("\n".join(describe_failure(report, page)))
        self.report = report
        self.page = page


def assert_check_passes(options: CheckOptions, folder: Path | None = None, name: str = "report") -> CheckReport:
    """Run a check and return its report.

    Args:
        folder: where the HTML report of a failure is written, as `<name>.html`; it is made if need be.

    Raises:
        CheckFailedError: any verdict but MATCH and TIE-FLIP.
        RtpError: a check that cannot be made at all.
    """
    from rtp_runtime.check import run_check

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of transformers are not the caller's
        report = run_check(options)
    if report.exit != 0:
        raise CheckFailedError(report, write_page(report, folder, name) if folder is not None else None)
    return report


def write_page(report: CheckReport, folder: Path, name: str) -> Path:
    """Write a report as HTML into `folder`; the file, named after `name`."""
    from rtp_runtime.check.render.html import render_html

    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name).strip('-') or 'report'}.html"
    page.write_text(render_html(report), encoding="utf-8")
    return page


def describe_failure(report: CheckReport, page: Path | None) -> Iterator[str]:
    """Verdict, cause and next step, then the first differences and what is missing, a line each."""
    from rtp_runtime.check.render.words import cause_sentence, next_step, size, verdict_sentence

    yield f"rtp check {report.model}"
    yield verdict_sentence(report)
    if report.cause is not None:
        yield cause_sentence(report.cause)
    yield next_step(report)
    causes = [finding for finding in report.failed if finding.cause]
    for finding in causes[:MAX_SHOWN]:
        yield f"  {finding.stage}: {finding.module}: {finding.what}: {size(finding)}; {finding.detail}"
    for item in [item for item in report.not_judged if item.required][:MAX_SHOWN]:
        yield f"  not judged: {item.what}: {item.why}"
    for found in report.inconsistent[:MAX_SHOWN]:
        yield f"  reference: {found.describe()}"
    if page is not None:
        yield f"The whole report: {page}"
