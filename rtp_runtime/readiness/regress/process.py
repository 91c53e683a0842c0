"""A process of its own for each run: memory is not measured on top of what ran before, and a crash is a finding."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from rtp_runtime.errors import RtpError

Progress = Callable[[str], None]


def run_apart(function: Callable[..., Any], *args: Any, say: Progress) -> Any:
    """`function(*args, say)` in a fresh process: what it returns.

    Raises:
        RtpError: what it raised, or how its process ended.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, function, args), daemon=True)
    process.start()
    theirs.close()
    try:
        while True:
            what, value = ours.recv()
            if what == "say":
                say(value)
            elif what == "done":
                return value
            else:
                raise RtpError(value)
    except EOFError:
        process.join()
        raise RtpError(f"its process ended without a result: {_ending(process.exitcode)}") from None
    finally:
        if process.is_alive():
            process.join(timeout=5)
        if process.is_alive():
            process.terminate()
        ours.close()


def _serve(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """In the new process: run, tell, and end. Only the parent writes results to stdout."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            value = function(*args, lambda message: pipe.send(("say", message)))
        except Exception as error:  # whatever a plugin or torch raises is the finding
            words = (str(error) or type(error).__name__).splitlines()[0]
            pipe.send(("error", words if isinstance(error, RtpError) else f"{type(error).__name__}: {words}"))
        else:
            pipe.send(("done", value))


def _ending(status: int | None) -> str:
    if status is not None and status < 0:
        killed = signal.Signals(-status).name
        return f"killed by {killed}" + (", perhaps for want of memory" if killed == "SIGKILL" else "")
    return f"exit status {status}"
