"""A whole bench: the model is loaded once, every point gets an engine of its own, and none is left out in silence."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rtp_runtime.errors import RtpError
from rtp_runtime.readiness.bench.measure import MIB, Run, fault, run_once, summarise
from rtp_runtime.readiness.bench.options import BenchOptions
from rtp_runtime.readiness.bench.remaining import Remaining
from rtp_runtime.readiness.metrics import INVALID, NOT_RUN, VALID, Point
from rtp_runtime.readiness.record import FAIL, PARTIAL, PASS
from rtp_runtime.readiness.subject import device_name, machine_name

if TYPE_CHECKING:
    from rtp_runtime.engine.engine import Engine
    from rtp_runtime.model import LoadedModel
    from rtp_runtime.plugins import Plugins

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Every point that was asked for, in the order of batch and prompt."""

    options: BenchOptions
    points: tuple[Point, ...]
    dtype: str
    seconds: float
    weights_mb: float
    """The model's parameters, in MiB."""
    threads: int
    """Of the processor, in one operation."""

    @property
    def faults(self) -> list[str]:
        """What was not measured, and why."""
        return [f"{point.name}: {point.status}: {point.why}" for point in self.points if point.status != VALID]

    @property
    def result(self) -> str:
        """As evidence: "pass" when every point was measured, "fail" when none was."""
        valid = sum(point.status == VALID for point in self.points)
        return PASS if valid == len(self.points) else PARTIAL if valid else FAIL

    @property
    def summary(self) -> str:
        valid = [point for point in self.points if point.status == VALID]
        words = f"{len(valid)} of {len(self.points)} points measured"
        if not valid:
            return words
        best = max(valid, key=lambda point: point.metrics["throughput_tok_s"])
        return f"{words}; up to {best.metrics['throughput_tok_s']:,.1f} tokens/s ({best.name})"

    def numbers(self) -> dict[str, Any]:
        """What a record keeps."""
        return {
            "points": [point.to_json() for point in self.points],
            "weights_mb": round(self.weights_mb, 3),
            "seconds": round(self.seconds, 2),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.options.model,
            "result": self.result,
            "summary": self.summary,
            "faults": self.faults,
            **self.numbers(),
            "dtype": self.dtype,
            "device": device_name(self.options.device),
            "machine": machine_name(),
            "seed": self.options.seed,
            "threads": self.threads,
            "settings": self.options.settings(),
        }


def run_bench(
    options: BenchOptions,
    plugins: Plugins,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> BenchReport:
    """Measure every point of `options`.

    Raises:
        RtpError: a model that cannot be loaded.
    """
    import torch

    from rtp_runtime.model import load_model

    started = time.monotonic()
    say = progress or _silent
    say("loading the model")
    loaded = load_model(
        options.model,
        dtype=options.dtype,
        device=options.device,
        plugins=plugins,
        deterministic=options.deterministic,
        trust_remote_code=options.trust_remote_code,
        progress=lambda done, total: say(f"loading weights: {done / MIB:,.0f} of {total / MIB:,.0f} MiB"),
    )
    bench = _Bench(loaded, options, say, clock, Remaining(options))
    points = [
        bench.measure(Point(batch=batch, prompt=prompt, new_tokens=options.new_tokens))
        for batch, prompt in options.points
    ]
    parameters = {id(each): each.nbytes for each in loaded.module.parameters()}
    return BenchReport(
        options=options,
        points=tuple(sorted(points, key=lambda point: point.key)),
        dtype=str(loaded.dtype).removeprefix("torch."),
        seconds=time.monotonic() - started,
        weights_mb=sum(parameters.values()) / MIB,
        threads=torch.get_num_threads(),
    )


@dataclass(frozen=True, slots=True)
class _Bench:
    """A loaded model, and how its points are measured."""

    loaded: LoadedModel
    options: BenchOptions
    say: Progress
    clock: Callable[[], float]
    remaining: Remaining

    def measure(self, point: Point) -> Point:
        """The point with what its runs gave, or with why it cannot be run."""
        try:
            why = _beyond_context(self.loaded, point)
            engine = None if why else _engine(self.loaded, self.options, point)
            why = why if engine is None else _shortage(engine, point)
            if engine is None or why:
                return self._not_run(point, why)
            runs = self._runs(engine, point)
        except (RtpError, RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
            words = (str(error) or type(error).__name__).splitlines()[0]
            return self._not_run(point, words if isinstance(error, RtpError) else f"it failed: {words}")
        why = fault(runs, point.batch, point.new_tokens, self.options.max_spread)
        memory = _device_memory(self.loaded) or max(run.memory for run in runs)
        metrics, spread = summarise(runs, memory) if min(run.seconds for run in runs) > 0.0 else ({}, {})
        return replace(
            point,
            status=INVALID if why else VALID,
            why=why,
            repeats=len(runs),
            metrics=metrics,
            spread=spread,
            notes=_notes(engine, runs, point),
        )

    def _not_run(self, point: Point, why: str) -> Point:
        self.remaining.skip(point.batch, point.prompt)
        return replace(point, status=NOT_RUN, why=why)

    def _runs(self, engine: Engine, point: Point) -> list[Run]:
        options = self.options
        prompts = draw_prompts(point.batch, point.prompt, engine.limits.vocab_size, options.seed)
        runs: list[Run] = []
        for number in range(options.warmup + options.repeats):
            counted = number - options.warmup + 1
            what = f"repeat {counted} of {options.repeats}" if counted > 0 else "warm-up"
            self.say(f"batch {point.batch}, prompt {point.prompt}: {what}{self.remaining.words()}")
            run = run_once(engine, prompts, point.new_tokens, self.clock)
            self.remaining.done(point.batch, point.prompt, run.seconds)
            if counted > 0:
                runs.append(run)
        return runs


def draw_prompts(batch: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of random ids, no two with the same beginning unless by chance."""
    source = random.Random(f"{seed} {batch} {length}")
    return [[source.randrange(vocab_size) for _ in range(length)] for _ in range(batch)]


def _silent(message: str) -> None:
    """Say nothing."""


def _engine(loaded: LoadedModel, options: BenchOptions, point: Point) -> Engine:
    from rtp_runtime.engine.config import EngineConfig
    from rtp_runtime.engine.engine import Engine

    gc.collect()  # the engine before this one, whose state would count as ours
    if loaded.device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(loaded.device)
    config = EngineConfig(
        max_num_seqs=point.batch,
        max_num_batched_tokens=max(point.batch, EngineConfig().max_num_batched_tokens),
        max_model_len=options.max_model_len or _length(point),
        deterministic=options.deterministic,
        prefix_caching=False,
        seed=options.seed,
    )
    return Engine(loaded, config)


def _length(point: Point) -> int:
    """Tokens of one request at its end."""
    return point.prompt + point.new_tokens


def _beyond_context(loaded: LoadedModel, point: Point) -> str:
    from rtp_runtime.engine.limits import model_limits

    context = model_limits(loaded.config, loaded.path).context
    if context is None or _length(point) <= context:
        return ""
    return f"{point.prompt} + {point.new_tokens} tokens are more than the model's context of {context}"


def _shortage(engine: Engine, point: Point) -> str:
    """Why the requests of a point cannot all run at once; empty when they can."""
    if _length(point) > engine.max_model_len:
        return f"{point.prompt} + {point.new_tokens} tokens are more than the longest request of {engine.max_model_len}"
    capacity = engine.capacity
    all_blocks = _blocks(engine, point)
    need = capacity.plan.extents_for(all_blocks)
    have = capacity.plan.num_extents
    if need <= have:
        return ""
    size = capacity.plan.extent_bytes / MIB
    blocks = ", ".join(
        f"{count} {'slots' if spec.is_slot else f'{spec.kind} blocks of {spec.block_size} tokens'}"
        for spec, count in zip(capacity.groups, all_blocks, strict=True)
    )
    return f"needs {blocks} at once: {need * size:,.1f} MiB of state, and there are {have * size:,.1f} MiB"


def _device_memory(loaded: LoadedModel) -> int | None:
    if loaded.device.type != "cuda":
        return None
    import torch

    return int(torch.cuda.max_memory_allocated(loaded.device))


def _blocks(engine: Engine, point: Point) -> list[int]:
    """What all requests take at their end, by group."""
    return [point.batch * count for count in engine.capacity.blocks(_length(point))]


def _notes(engine: Engine, runs: Sequence[Run], point: Point) -> tuple[str, ...]:
    """What bounded the point."""
    run, plan = runs[0], engine.capacity.plan
    state = plan.extents_for(_blocks(engine, point)) * plan.extent_bytes / MIB
    notes = [
        f"{point.batch * point.prompt} prompt tokens in {run.prefill_steps} step{'s' * (run.prefill_steps > 1)} of at "
        f"most {engine.config.max_num_batched_tokens} tokens",
        f"{state:,.2f} MiB of state",
    ]
    lost = sum(each.preemptions for each in runs)
    return (*notes, f"{lost} preemptions: state was short") if lost else tuple(notes)
