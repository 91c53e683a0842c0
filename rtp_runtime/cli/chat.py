"""`rtp chat`: answer in turns, streaming; works at a terminal, with one message, and with lines piped in."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rtp_runtime.cli.model_options import (
    add_model_options,
    add_sampling_options,
    open_llm,
    sampling_params,
    stdin_lines,
    write,
)
from rtp_runtime.cli.output import print_json, say
from rtp_runtime.engine.sampling_params import SamplingParams
from rtp_runtime.errors import RequestError, UsageError

if TYPE_CHECKING:
    from rtp_runtime.engine.outputs import RequestOutput
    from rtp_runtime.llm import LLM

SUMMARY = "the same, in turns"

Message = dict[str, str]


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `rtp chat`."""
    add_model_options(parser)
    parser.add_argument("--message", metavar="TEXT", help="answer this and end; default: turns from standard input")
    parser.add_argument("--system", metavar="TEXT", help="a system message before the first turn")
    add_sampling_options(parser, max_tokens=None, temperature=0.0)
    parser.add_argument("--json", action="store_true", help="one object with all messages at the end")


def run(args: argparse.Namespace) -> int:
    """Hold the conversation."""
    params = sampling_params(args)
    if args.message is not None and not args.message.strip():
        raise UsageError("--message is empty: give a text")
    at_terminal = args.message is None and sys.stdin is not None and sys.stdin.isatty()
    with open_llm(args) as llm:
        messages: list[Message] = [] if args.system is None else [{"role": "system", "content": args.system}]
        # A model that cannot chat is found out before anybody types.
        llm.chat_prompt([*messages, {"role": "user", "content": "?"}])
        reason: str | None = None
        for text in _turns(args.message, at_terminal):
            messages.append({"role": "user", "content": text})
            try:
                output = _answer(llm, messages, params, quiet=args.json)
            except RequestError as error:
                if not at_terminal:
                    raise
                messages.pop()
                say(f"error: {error}")
                continue
            messages.append({"role": "assistant", "content": output.text or ""})
            reason = output.finish_reason
    if args.json:
        print_json({"messages": messages, "finish_reason": reason})
    return 0


def _turns(message: str | None, at_terminal: bool) -> Iterator[str]:
    """What the user says: the one message, each line typed, or each line piped in."""
    if message is not None:
        yield message
        return
    if not at_terminal:
        yield from _piped_lines()
        return
    say("Ctrl-D ends; Ctrl-C stops an answer.")
    while True:
        try:
            line = _ask()
        except (EOFError, KeyboardInterrupt):
            say("")
            return
        if line.strip():
            yield line


def _piped_lines() -> Iterator[str]:
    none = True
    for line in stdin_lines():
        if line.strip():
            none = False
            yield line.rstrip("\n")
    if none:
        raise UsageError('there is no message: rtp chat MODEL --message "some text", or pipe lines in')


def _ask() -> str:
    sys.stderr.write("> ")
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _answer(llm: LLM, messages: list[Message], params: SamplingParams, *, quiet: bool) -> RequestOutput:
    """Stream one answer; Ctrl-C ends it and keeps what was said."""
    output: RequestOutput | None = None
    stream = llm.stream(llm.chat_prompt(messages), params, special=False)
    try:
        for output in stream:
            if not quiet:
                write(output.new_text or "")
    except KeyboardInterrupt:
        if output is None:
            raise
    if not quiet:
        write("\n")
    assert output is not None, "a request yields at least one output"
    return output
