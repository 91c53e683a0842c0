"""The pytest plugin for authors of plugins: `rtp check` as a fixture, over the models that the command line names.

Nothing heavy is imported before a test asks for a check.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rtp_runtime.check import CheckReport


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rtp-model` and `--rtp-report`."""
    group = parser.getgroup("rtp", "checking models with rtp")
    group.addoption(
        "--rtp-model",
        action="append",
        default=[],
        metavar="PATH",
        help="checkpoint for tests that take rtp_model; may be given several times",
    )
    group.addoption(
        "--rtp-report", metavar="DIR", help="write the HTML report of every check there; else of failures, in tmp_path"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `rtp_model` runs once for each model of the command line."""
    if "rtp_model" in metafunc.fixturenames:
        models: Sequence[str] = metafunc.config.getoption("--rtp-model")
        named = [pytest.param(Path(model), id=Path(model).name) for model in models]
        skipped = pytest.param(None, marks=pytest.mark.skip(reason="no --rtp-model was given"), id="no model")
        metafunc.parametrize("rtp_model", named or [skipped])


class Checker:
    """What the fixture `rtp_check` is: call it with a checkpoint and options of a check."""

    def __init__(self, folder: Path, keep: bool, name: str) -> None:
        self._folder = folder
        self._keep = keep
        self._name = name
        self._count = 0

    def __call__(self, model: str | Path, **options: Any) -> CheckReport:
        """Check `model` and return the report; the test fails unless the exit status would be 0.

        `options` are fields of `rtp_runtime.check.CheckOptions`: reference, stages, plugins, lengths, …

        Raises:
            RtpError: a check that cannot be made at all.
        """
        __tracebackhide__ = True
        from rtp_runtime.check import CheckOptions
        from rtp_runtime.testing.checking import CheckFailedError, assert_check_passes, write_page

        self._count += 1
        name = self._name if self._count == 1 else f"{self._name}-{self._count}"
        if options.get("reference") is not None:
            options["reference"] = Path(options["reference"])
        try:
            report = assert_check_passes(CheckOptions(model=Path(model), **options), self._folder, name)
        except CheckFailedError as failure:
            pytest.fail(str(failure), pytrace=False)
        if self._keep:
            write_page(report, self._folder, name)
        return report


@pytest.fixture
def rtp_check(request: pytest.FixtureRequest, tmp_path: Path) -> Checker:
    """Checks a checkpoint and fails the test, readably, unless it passes."""
    folder = request.config.getoption("--rtp-report")
    return Checker(Path(folder) if folder else tmp_path, bool(folder), request.node.name)
