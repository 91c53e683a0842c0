"""The `rtp` command: parses arguments, runs one command, turns errors into messages and exit statuses.

Each command is one file here, named as the command, and is imported only when it is run or when help lists it:

    \"\"\"`rtp inspect`: what a checkpoint needs and what serves it.\"\"\"

    SUMMARY = "one line for `rtp --help`"

    def configure(parser: argparse.ArgumentParser) -> None: ...   # adds arguments; prints nothing
    def run(args: argparse.Namespace) -> int: ...                 # returns the exit status

The frame adds `--debug` and `--plugin MODULE` (`args.plugin`, a list of names) to every command. Heavy packages are
imported inside `run`. A command lets `RtpError` pass: the frame prints its message and exits with status 2.
Results go to stdout; with `--json`, one object and nothing else (`output.print_json`). Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from rtp_runtime.cli.output import say
from rtp_runtime.env import read_environment
from rtp_runtime.errors import RtpError, UsageError

COMMANDS = ("enable", "check", "bench", "readiness", "regress", "inspect", "generate", "chat", "plugins")
"""The commands of rtp itself, in the order of `rtp --help`. Plugins add others."""

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_USAGE = "usage: rtp COMMAND [ARGUMENTS]   (rtp --help lists the commands, rtp COMMAND --help its arguments)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rtp` with these arguments (default: the process's own) and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        debug = debug or read_environment().debug
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except RtpError as error:
        return _fail(error, str(error), debug)
    except KeyboardInterrupt:
        say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader left (`rtp … | head`): what Python would flush at exit has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _fail(error, f"{place}{error.strerror or error}", debug)
    except Exception as error:
        # Status 1 means "judged, and wrong" to `rtp check`: a fault of ours must not look like it.
        return _fail(
            error, f"internal: {type(error).__name__}: {error}. This is a fault of rtp; please report it.", True
        )


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else EXIT_ERROR
    if arguments[0] == "--version":
        from rtp_runtime import __version__
        from rtp_runtime.hookspecs import API_VERSION

        print(f"rtp {__version__} (API {API_VERSION})")
        return 0
    name, rest = arguments[0], arguments[1:]
    module = _command_module(name, rest)
    args = command_parser(name, module).parse_args(rest)
    return int(module.run(args))


def command_parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    """The parser of one command: what the command adds, and what every command has."""
    parser = argparse.ArgumentParser(prog=f"rtp {name}", description=module.SUMMARY, allow_abbrev=False)
    module.configure(parser)
    parser.add_argument("--plugin", action="append", default=[], metavar="MODULE", help="also load this plugin module")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _command_module(name: str, rest: Sequence[str]) -> ModuleType:
    if name in COMMANDS:
        return importlib.import_module(f"rtp_runtime.cli.{name}")
    from rtp_runtime.plugins import load_plugins

    commands = load_plugins(_named_plugins(rest)).commands
    if name in commands:
        return commands.load(name)
    known = [*COMMANDS, *commands.names()]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean `rtp {near[0]}`?" if near else ""
    raise UsageError(f"{name!r} is not a command of rtp.{hint} The commands are {', '.join(known)}.")


def _named_plugins(rest: Sequence[str]) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--plugin", action="append", default=[])
    return list(parser.parse_known_args(rest)[0].plugin)


def _help() -> str:
    from rtp_runtime.plugins import load_plugins

    summaries = {name: _command_module(name, ()).SUMMARY for name in COMMANDS}
    summaries |= load_plugins().commands.summaries()
    width = max(map(len, summaries))
    lines = [f"  {name.ljust(width)}  {summary}" for name, summary in summaries.items()]
    return "\n".join([_USAGE, "", *lines])


def _fail(error: Exception, message: str, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    say(f"error: {message}")
    return EXIT_ERROR
