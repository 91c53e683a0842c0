"""The arguments that `rtp generate` and `rtp chat` share, and what they make of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rtp_runtime.engine.sampling_params import SamplingParams
from rtp_runtime.errors import UsageError

if TYPE_CHECKING:
    from rtp_runtime.llm import LLM


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """MODEL and how it is loaded and run."""
    parser.add_argument("model", metavar="MODEL", help="a checkpoint directory or hub id")
    group = parser.add_argument_group("model")
    group.add_argument("--dtype", default="auto", help='"auto" (the checkpoint\'s), float32, bfloat16 …')
    group.add_argument("--device", default="cpu")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest request, prompt and output together")
    group.add_argument(
        "--deterministic", action="store_true", help="only ops whose rows do not depend on their company"
    )
    group.add_argument("--trust-remote-code", action="store_true", help="allow code that the checkpoint brings")


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int | None, temperature: float) -> None:
    """How tokens are chosen, and when to stop."""
    group = parser.add_argument_group("sampling")
    allowed = "up to the end of the context" if max_tokens is None else str(max_tokens)
    group.add_argument(
        "--max-tokens", type=int, metavar="N", default=max_tokens, help=f"new tokens at most ({allowed})"
    )
    group.add_argument("--temperature", type=float, default=temperature, help="0 is greedy (default: %(default)s)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="0: all tokens")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X")
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X")
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X")
    group.add_argument("--seed", type=int, help="makes a sampled answer repeatable")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    group.add_argument("--stop-token-id", action="append", default=[], type=int, metavar="ID", help="may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")


def sampling_params(args: argparse.Namespace, *, logprobs: int | None = None) -> SamplingParams:
    """
    Raises:
        UsageError: a value out of its range.
    """
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=args.stop,
        stop_token_ids=args.stop_token_id,
        ignore_eos=args.ignore_eos,
        logprobs=logprobs,
    )


def open_llm(args: argparse.Namespace) -> LLM:
    """The model for one request at a time."""
    from rtp_runtime.llm import LLM

    return LLM(
        args.model,
        dtype=args.dtype,
        device=args.device,
        plugins=args.plugin,
        trust_remote_code=args.trust_remote_code,
        progress=_show_progress if sys.stderr.isatty() else None,
        max_num_seqs=1,
        max_model_len=args.max_model_len,
        deterministic=args.deterministic,
    )


def _show_progress(done: int, total: int) -> None:
    end = "\r" if done < total else "\r\033[K"
    sys.stderr.write(f"loading weights: {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB{end}")
    sys.stderr.flush()


def stdin_lines() -> Iterator[str]:
    """The lines that are piped in, as they come.

    Raises:
        UsageError: what is piped in is not text.
    """
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not {error.encoding} text (byte {error.start}): give text") from error


def write(text: str) -> None:
    """Show text at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
