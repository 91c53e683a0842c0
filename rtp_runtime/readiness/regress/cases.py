"""The case file of `rtp regress`: which models are run how, on which hardware, and how much worse a number may become.

schema = 1
baselines = "baselines"

[hardware]
name = "one H200"
device = "NVIDIA H200*"

[tolerances]
throughput_tok_s = 0.05

[[cases]]
name = "chat model"
model = "models/chat"
kinds = ["check", "bench"]

[cases.bench]
batch = [1, 8]
prompt = [128, 512]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rtp_runtime.errors import UsageError
from rtp_runtime.readiness.bench.options import BenchOptions
from rtp_runtime.readiness.declarative import Table, read_toml
from rtp_runtime.readiness.metrics import METRICS
from rtp_runtime.readiness.targets import Hardware, read_hardware

SCHEMA = 1
KINDS = ("check", "bench")
DTYPES = ("auto", "float32", "bfloat16", "float16")
TOLERANCES: Mapping[str, float] = {
    "ttft_ms_p50": 0.15,
    "ttft_ms_p99": 0.30,
    "tpot_ms": 0.10,
    "tpot_ms_p99": 0.30,
    "throughput_tok_s": 0.10,
    "memory_mb": 0.10,
}
"""Shares by which a number may be worse than its baseline, where the file does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model and what is run of it."""

    name: str
    model: str
    """A directory, or a hub id."""
    kinds: tuple[str, ...]
    dtype: str
    device: str
    seed: int
    plugins: tuple[str, ...]
    stages: tuple[str, ...]
    """Of the check; empty: all."""
    bench: BenchOptions
    tolerances: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFile:
    """All cases of one file."""

    file: str
    baselines: Path
    hardware: Hardware
    cases: tuple[Case, ...]


def read_cases(file: Path) -> CaseFile:
    """
    Raises:
        UsageError: a file that is not one of cases; the message says where and what would be right.
    """
    top = read_toml(file, SCHEMA)
    folder = file.resolve().parent
    baselines = folder / top.string("baselines", "baselines")
    hardware = read_hardware(top.table("hardware"))
    shared = _tolerances(top.table("tolerances", None), TOLERANCES)
    cases = top.named("cases", lambda table: _case(table, folder, shared))
    top.finish()
    return CaseFile(file=str(file), baselines=baselines, hardware=hardware, cases=cases)


def _case(table: Table, folder: Path, shared: Mapping[str, float]) -> Case:
    name = table.string("name")
    if any(character in name for character in "\n\r·"):
        raise table.refuse("name", f"= {name!r} holds a line break or “·”: leave them out")
    model = _model(table.string("model"), folder)
    dtype = table.string("dtype", "auto", choices=DTYPES)
    device = table.string("device", "cpu")
    seed = table.integer("seed", 0)
    deterministic = table.boolean("deterministic", False)
    kinds = table.strings("kinds", KINDS, choices=KINDS)
    if not kinds or len(set(kinds)) != len(kinds):
        raise table.refuse("kinds", f"= {list(kinds)!r}: name each kind once, at least one of {', '.join(KINDS)}")
    plugins = table.strings("plugins", ())
    stages = _stages(table, kinds)
    bench = _bench(
        table, kinds, BenchOptions(model=model, dtype=dtype, device=device, seed=seed, deterministic=deterministic)
    )
    tolerances = _tolerances(table.table("tolerances", None), shared)
    table.finish()
    return Case(
        name=name,
        model=model,
        kinds=kinds,
        dtype=dtype,
        device=device,
        seed=seed,
        plugins=plugins,
        stages=stages,
        bench=bench,
        tolerances=tolerances,
    )


def _model(given: str, folder: Path) -> str:
    """A directory beside the file, or the hub id as it is."""
    path = folder / Path(given).expanduser()
    return str(path) if path.exists() else given


def _stages(table: Table, kinds: tuple[str, ...]) -> tuple[str, ...]:
    from rtp_runtime.check.options import STAGES

    check: Table | None = table.table("check", None)
    if check is None:
        return ()
    if "check" not in kinds:
        raise table.refuse("check", 'is given, and "check" is not among the kinds: add it, or leave the table out')
    stages: tuple[str, ...] = check.strings("stages", (), choices=STAGES)
    check.finish()
    return stages


def _bench(table: Table, kinds: tuple[str, ...], options: BenchOptions) -> BenchOptions:
    from dataclasses import replace

    bench: Table | None = table.table("bench", None)
    if bench is None:
        if "bench" in kinds:
            raise table.refuse("bench", "is missing: give the points, [cases.bench] with batch and prompt")
        return options
    if "bench" not in kinds:
        raise table.refuse("bench", 'is given, and "bench" is not among the kinds: add it, or leave the table out')
    given = {
        "batches": bench.integers("batch", low=1),
        "prompts": bench.integers("prompt", low=1),
        "new_tokens": bench.integer("new_tokens", options.new_tokens, low=2),
        "warmup": bench.integer("warmup", options.warmup),
        "repeats": bench.integer("repeats", options.repeats, low=1),
        "max_spread": bench.number("max_spread", options.max_spread, open_low=True),
        "max_model_len": bench.integer("max_model_len", None, low=2),
    }
    bench.finish()
    try:
        return replace(options, **given)
    except UsageError as error:
        raise UsageError(f"{bench.file}: {bench.path}: {error}") from error


def _tolerances(table: Table | None, default: Mapping[str, float]) -> dict[str, float]:
    if table is None:
        return dict(default)
    found = {name: table.number(name, default[name]) for name in METRICS}
    table.finish()
    return found
