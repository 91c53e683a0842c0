"""Our generate against transformers' generate: same process, same weights, same prompts, in turns.

Prints a table and writes the numbers as JSON. On a shared machine only the ratios hold: they are taken round by round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rtp_runtime import LLM, SamplingParams
from rtp_runtime.readiness.bench.run import draw_prompts

TARGETS = {1: 1.2, 8: 1.3, 32: 1.3}


def reference_generate(model: Any, new_tokens: int) -> Callable[[list[list[int]]], list[list[int]]]:
    def generate(prompts: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(prompts)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        rows: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return rows

    return generate


def our_generate(llm: LLM, new_tokens: int) -> Callable[[list[list[int]]], list[list[int]]]:
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    return lambda prompts: [list(output.token_ids) for output in llm.generate(prompts, params)]


def agreement(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> float:
    """Share of tokens before the first difference; in bfloat16 near ties flip."""
    same = 0
    for left, right in zip(ours, theirs, strict=True):
        pairs = enumerate(zip(left, right, strict=True))
        same += next((place for place, (a, b) in pairs if a != b), len(left))
    return same / sum(len(row) for row in ours)


def measure(batch: int, rounds: int, length: int, new_tokens: int, llm: LLM, reference: Any) -> dict[str, Any]:
    prompts = draw_prompts(batch, length, reference.config.vocab_size, seed=batch)
    runs = {"rtp": our_generate(llm, new_tokens), "transformers": reference_generate(reference, new_tokens)}
    results = {name: run(prompts) for name, run in runs.items()}  # warm-up
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in track(range(rounds), description=f"batch {batch}", console=Console(stderr=True), transient=True):
        for name, run in runs.items():
            start = time.perf_counter()
            run(prompts)
            seconds[name].append(time.perf_counter() - start)
    ratios = [theirs / ours for ours, theirs in zip(seconds["rtp"], seconds["transformers"], strict=True)]
    tokens = batch * new_tokens
    return {
        "batch": batch,
        "rtp_tokens_per_s": tokens / statistics.median(seconds["rtp"]),
        "transformers_tokens_per_s": tokens / statistics.median(seconds["transformers"]),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "target": TARGETS.get(batch),
        "same_tokens": agreement(results["rtp"], results["transformers"]),
    }


def report(rows: list[dict[str, Any]], conditions: dict[str, Any]) -> None:
    table = Table(title=f"{conditions['model']}, {conditions['dtype']}, {conditions['threads']} threads")
    for column in ("batch", "transformers tok/s", "rtp tok/s", "ratio", "range", "target", "same tokens"):
        table.add_column(column, justify="right")
    for row in rows:
        low, high = row["ratio_range"]
        table.add_row(
            str(row["batch"]),
            f"{row['transformers_tokens_per_s']:.1f}",
            f"{row['rtp_tokens_per_s']:.1f}",
            f"{row['ratio']:.2f}",
            f"{low:.2f} – {high:.2f}",
            "–" if row["target"] is None else f"{row['target']:.1f}",
            f"{row['same_tokens']:.0%}",
        )
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="checkpoint directory")
    parser.add_argument("--plugin", action="append", default=[], help="plugin module besides the installed ones")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON here")
    args = parser.parse_args()

    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    llm = LLM(str(args.model), dtype=args.dtype, plugins=args.plugin, max_num_seqs=max(args.batch))
    conditions = {
        "model": args.model.name,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
    }
    rows = [measure(n, args.rounds, args.prompt_tokens, args.new_tokens, llm, reference) for n in args.batch]
    report(rows, conditions)
    if args.out is not None:
        args.out.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
