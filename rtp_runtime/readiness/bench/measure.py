"""One run of one point: requests go in together, and each token is timed when the engine hands it over.

Reading a token's value waits for the device, so no other synchronisation is needed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rtp_runtime.engine.sampling_params import SamplingParams
from rtp_runtime.readiness.bench.options import MIN_REPEATS
from rtp_runtime.readiness.metrics import METRICS, percentile, spread_of

if TYPE_CHECKING:
    from rtp_runtime.engine.engine import Engine

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one run took, in seconds from the moment that its requests were handed over."""

    first: tuple[float, ...]
    """Of each request, when its first token came."""
    last: tuple[float, ...]
    counts: tuple[int, ...]
    """Output tokens of each request."""
    cached: int
    """Prompt tokens that were not computed; any makes the run worthless."""
    seconds: float
    steps: int
    prefill_steps: int
    """Steps until every request had its first token."""
    preemptions: int
    memory: int
    """Bytes, the most that was seen."""

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds

    @property
    def per_token(self) -> list[float]:
        """Of each request, seconds between one token and the next."""
        spans = zip(self.first, self.last, self.counts, strict=True)
        return [(last - first) / (count - 1) for first, last, count in spans]


def run_once(
    engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> Run:
    """Generate `new_tokens` for each prompt, greedily and past any end-of-sequence token."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    before = engine.num_preemptions
    start = clock()
    ids = [engine.add(prompt, params) for prompt in prompts]
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    steps = prefill_steps = memory = 0
    while engine.has_work:
        news = engine.step()
        now = clock() - start
        steps += 1
        prefill_steps += len(first) < len(ids)
        for each in news:
            first.setdefault(each.request_id, now)
            last[each.request_id] = now
        memory = max(memory, resident_bytes()) if steps % 8 == 1 else memory
    seconds = clock() - start
    outputs = [engine.output(each) for each in ids]
    return Run(
        first=tuple(first.get(each, seconds) for each in ids),
        last=tuple(last.get(each, seconds) for each in ids),
        counts=tuple(len(output.token_ids) for output in outputs),
        cached=sum(output.num_cached_tokens for output in outputs),
        seconds=seconds,
        steps=steps,
        prefill_steps=prefill_steps,
        preemptions=engine.num_preemptions - before,
        memory=max(memory, resident_bytes()),
    )


def fault(runs: Sequence[Run], batch: int, new_tokens: int, max_spread: float) -> str:
    """Why these runs count for nothing; empty when they do."""
    if len(runs) < MIN_REPEATS:
        return f"too few samples: {len(runs)} repeats, at least {MIN_REPEATS} are needed"
    for run in runs:
        if run.counts != (new_tokens,) * batch:
            return f"{run.tokens} tokens came and {batch} × {new_tokens} were asked for"
        if run.cached:
            return f"{run.cached} tokens of the prompts were not computed but taken from a cache"
        if run.seconds <= 0.0 or min(run.first) <= 0.0 or min(run.per_token) <= 0.0:
            return "a duration of zero: the clock is too coarse for this point"
    spread = spread_of(run.throughput for run in runs)
    if spread > max_spread:
        return f"the spread of the throughput is {spread:.0%}, allowed {max_spread:.0%}: the machine is not quiet"
    return ""


def summarise(runs: Sequence[Run], memory: int) -> tuple[dict[str, float], dict[str, float]]:
    """(metrics, their spread over the runs). Percentiles are over the requests of all runs, by nearest rank."""
    first = [1e3 * each for run in runs for each in run.first]
    token = [1e3 * each for run in runs for each in run.per_token]
    metrics = {
        "ttft_ms_p50": percentile(first, 0.50),
        "ttft_ms_p99": percentile(first, 0.99),
        "tpot_ms": percentile(token, 0.50),
        "tpot_ms_p99": percentile(token, 0.99),
        "throughput_tok_s": statistics.median(run.throughput for run in runs),
        "memory_mb": memory / MIB,
    }
    first_spread = spread_of(statistics.median(run.first) for run in runs)
    token_spread = spread_of(statistics.median(run.per_token) for run in runs)
    spread = {
        "ttft_ms_p50": first_spread,
        "ttft_ms_p99": spread_of(max(run.first) for run in runs),
        "tpot_ms": token_spread,
        "tpot_ms_p99": spread_of(max(run.per_token) for run in runs),
        "throughput_tok_s": spread_of(run.throughput for run in runs),
        "memory_mb": 0.0,
    }
    return {name: round(metrics[name], 4) for name in METRICS}, {name: round(spread[name], 4) for name in METRICS}


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; where the system does not say, the most there ever was."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
