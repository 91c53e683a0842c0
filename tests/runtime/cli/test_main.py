"""The frame of `rtp`: exit statuses, messages without tracebacks, help."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

import rtp_runtime
from rtp_runtime import cli
from rtp_runtime.errors import CheckpointError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a command whose `run` is given in the place of `rtp plugins`."""

    def put(run: Any) -> None:
        monkeypatch.setattr("rtp_runtime.cli.plugins.run", run)

    return put


def raising(error: BaseException) -> Any:
    def run(args: Any) -> int:
        raise error

    return run


def test_the_status_of_a_command_is_returned(command: Any) -> None:
    command(lambda args: 3)
    assert cli.main(["plugins"]) == 3


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (CheckpointError("tensor x of file y is short"), 2, "error: tensor x of file y is short\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (PermissionError(13, "Permission denied", "some/file"), 2, "error: some/file: Permission denied\n"),
        (OSError("disk gone"), 2, "error: disk gone\n"),
    ],
)
def test_errors_become_messages(
    error: BaseException, status: int, words: str, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(error))
    assert cli.main(["plugins"]) == status
    assert capsys.readouterr().err == words


@pytest.mark.parametrize("how", ["--debug", "RTP_DEBUG"])
def test_debug_shows_the_traceback(
    how: str, command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command(raising(CheckpointError("short")))
    if how == "RTP_DEBUG":
        monkeypatch.setenv("RTP_DEBUG", "1")
    assert cli.main(["plugins", *([how] if how == "--debug" else [])]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_of_ours_shows_itself_and_is_not_status_1(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command(raising(RuntimeError("a bug")))
    assert cli.main(["plugins"]) == 2
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "RuntimeError: a bug" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plugin"], "Did you mean `rtp plugins`?"),
        (["--nonsense"], "'--nonsense' is not a command of rtp"),
    ],
)
def test_an_unknown_command(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_bad_arguments_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["plugins", "--jso"], ["plugins", "surplus"], ["plugins", "--plugin"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 2
    assert "usage: rtp plugins" in capsys.readouterr().err


def test_a_bad_environment_exits_2(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTP_DEBUG", "maybe")
    assert cli.main(["plugins"]) == 2
    assert "RTP_DEBUG='maybe' is neither 1 nor 0" in capsys.readouterr().err


def test_help_lists_every_command_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    told = capsys.readouterr().out
    for name in cli.COMMANDS:
        module: ModuleType = __import__(f"rtp_runtime.cli.{name}", fromlist=["SUMMARY"])
        assert f"  {name} " in told
        assert module.SUMMARY in told
    assert cli.main([]) == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"rtp {rtp_runtime.__version__} (API 0.1)\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    code = (
        "import sys; from rtp_runtime import cli, errors\n"
        "from rtp_runtime.cli import plugins\n"
        "def run(args):\n    for _ in range(100000): print('line')\n    return 0\n"
        "plugins.run = run\n"
        "sys.exit(cli.main(['plugins']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    told = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=30), told) == (141, b"")
