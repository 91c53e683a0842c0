"""`rtp generate`: continue a prompt, streaming text, or ids where the model has no tokenizer."""

from __future__ import annotations

import argparse
import math
import sys
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rtp_runtime.cli.model_options import (
    add_model_options,
    add_sampling_options,
    open_llm,
    sampling_params,
    stdin_lines,
    write,
)
from rtp_runtime.cli.output import print_json
from rtp_runtime.errors import UsageError

if TYPE_CHECKING:
    from rtp_runtime.engine.outputs import RequestOutput, TokenLogprobs

SUMMARY = "text from a prompt, or ids"


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `rtp generate`."""
    add_model_options(parser)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="default: standard input")
    parser.add_argument("--token-ids", metavar="5,7,9", help="the prompt as token ids")
    add_sampling_options(parser, max_tokens=128, temperature=0.0)
    parser.add_argument("--logprobs", type=int, metavar="K", help="with --json: the K most likely tokens at each place")
    parser.add_argument("--json", action="store_true", help="one object with ids, text and why it ended")


def run(args: argparse.Namespace) -> int:
    """Print the continuation."""
    params = sampling_params(args, logprobs=args.logprobs)
    if args.logprobs is not None and not args.json:
        raise UsageError("--logprobs are only shown with --json: add it")
    prompt = _prompt(args)
    with open_llm(args) as llm:
        stream = llm.stream(prompt, params)
        output = next(stream)
        if args.json:
            print_json(_report(deque(stream, maxlen=1).pop() if not output.finished else output))
        else:
            _show(output, stream)
    return 0


def _prompt(args: argparse.Namespace) -> str | list[int]:
    if args.token_ids is not None:
        if args.prompt is not None:
            raise UsageError(f"--token-ids {args.token_ids} and the prompt {args.prompt!r} were both given: give one")
        return _parse_ids(args.token_ids)
    if args.prompt is not None:
        prompt: str = args.prompt
    elif sys.stdin is None or sys.stdin.isatty():
        raise UsageError('there is no prompt: rtp generate MODEL "some text", or --token-ids 5,7,9, or pipe text in')
    else:
        prompt = "".join(stdin_lines())
    if not prompt:
        raise UsageError("the prompt is empty: give a text, or --token-ids 5,7,9")
    return prompt


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--token-ids {text!r} is no list of integers: write them like 5,7,9") from error


def _show(output: RequestOutput, stream: Iterator[RequestOutput]) -> None:
    """Print each piece as it comes; ids are joined by commas, so that they can be given back."""
    separator = ""
    while True:
        if output.new_text is not None:
            write(output.new_text)
        else:
            write(separator + ",".join(map(str, output.new_token_ids)))
            separator = ","
        if output.finished:
            break
        output = next(stream)
    write("\n")


def _report(output: RequestOutput) -> dict[str, Any]:
    report: dict[str, Any] = {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if output.logprobs is not None:
        report["logprobs"] = [_logprobs(entry) for entry in output.logprobs]
    return report


def _logprobs(entry: TokenLogprobs) -> list[dict[str, Any]]:
    """JSON has no infinity: the log of a probability of 0 is null."""
    return [
        {"token_id": token_id, "logprob": each.logprob if math.isfinite(each.logprob) else None, "rank": each.rank}
        for token_id, each in entry.items()
    ]
