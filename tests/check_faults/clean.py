"""Runs that must raise no alarm: other seeds, dtypes, shards, kernels, prompts and configs that change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from rtp_runtime.check import STAGES, CheckOptions, CheckReport, run_check

PLAIN_OPS = """
from rtp_runtime import hookimpl

RTP_API = "0.1"


@hookimpl
def rtp_register_kernels(ops):
    ops.add("paged_attention", "check_faults.plain:PlainAttention")
    ops.add("experts", "check_faults.plain:PlainExperts")
    ops.add("linear", "check_faults.plain:DoubleLinear")
"""
QUICK = tuple(stage for stage in STAGES if stage != "modes")


def narrow(directory: Path) -> None:
    """Weights stored in bfloat16, as releases are; tables and what is pinned stay as they are."""
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: t.bfloat16() if name.endswith((".weight", "_proj")) else t for name, t in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def shards(directory: Path) -> None:
    """Tensors dealt over three files, in another order."""
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors, reverse=True)
    index: dict[str, str] = {}
    for part in range(3):
        file = f"model-{part + 1:05d}-of-00003.safetensors"
        index |= dict.fromkeys(names[part::3], file)
        save_file({name: tensors[name] for name in names[part::3]}, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors").unlink()
    text = json.dumps({"metadata": {}, "weight_map": index})
    (directory / "model.safetensors.index.json").write_text(text)


def inert_keys(directory: Path) -> None:
    """Config keys that decide nothing."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) | {"initializer_range": 0.5, "use_cache": False, "a_new_key": 1}
    file.write_text(json.dumps(config))


def nothing(directory: Path) -> None:
    """The checkpoint as transformers wrote it."""


@dataclass(frozen=True, slots=True)
class CleanRun:
    """One run that must pass."""

    base: str
    seed: int
    what: str
    edit: Callable[[Path], None] = nothing
    options: Mapping[str, Any] = field(default_factory=dict)
    plain_ops: bool = False

    def run(self, model: Path) -> CheckReport:
        """`model`: a copy of the checkpoint, edited."""
        values = {"lengths": (10, 14, 40), "num_new_tokens": 6, "stages": QUICK} | dict(self.options)
        plugins = ("clean_plain_ops",) if self.plain_ops else ()
        return run_check(CheckOptions(model=model, plugins=plugins, **values))


def clean_runs(names: tuple[str, ...], seeds: tuple[int, ...]) -> Iterator[CleanRun]:
    """Each model under each seed, in the ways that change nothing."""
    for name in names:
        for seed in seeds:
            yield CleanRun(name, seed, "as it is", options={"stages": STAGES} if seed == seeds[0] else {})
            yield CleanRun(name, seed, "other prompts", options={"seed": 11 + seed, "lengths": (3, 33, 70)})
        yield CleanRun(name, seeds[0], "stored in bfloat16", narrow)
        yield CleanRun(name, seeds[0], "three files, another order", shards)
        yield CleanRun(name, seeds[0], "keys that decide nothing", inert_keys)
        yield CleanRun(name, seeds[-1], "plain kernels", plain_ops=True)
