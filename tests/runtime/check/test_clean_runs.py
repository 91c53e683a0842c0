"""Clean runs pass, legitimate differences included: other kernels, other seeds, loops over experts, larger batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rtp_runtime.check import STAGES, CheckOptions, run_check
from rtp_runtime.check.reference import Reference
from rtp_runtime.testing.tiny_models import write_tiny

LENGTHS = (10, 14, 40)
KINDS = ("qwen3_next", "deepseek_v32", "deepseek_v4", "minimax_m3_vl")
"""Recurrences, selections of tokens, blocks and entries, compressed context, residual streams, wrappers."""
PLAIN = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""The tiny checkpoints of every model are checked where each plugin is alone (tools/alone)."""
NO_SUCH_MODES = ("restored from a snapshot", "kernels: plain references", "captured graphs", "parallel ranks")
"""Of models that keep no state per request, and whose kernels have two sets only; and what does not exist yet."""

PLAIN_OPS = """
from rtp_runtime import hookimpl

RTP_API = "0.1"


@hookimpl
def rtp_register_kernels(ops):
    ops.add("paged_attention", "check_faults.plain:PlainAttention")
    ops.add("experts", "check_faults.plain:PlainExperts")
    ops.add("linear", "check_faults.plain:DoubleLinear")
"""


def options(model: Path, **more: Any) -> CheckOptions:
    return CheckOptions(model=model, lengths=LENGTHS, num_new_tokens=6, **more)


@pytest.mark.parametrize("name", PLAIN)
def test_tiny_checkpoint_passes(
    name: str, checkpoint: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    report = run_check(options(checkpoint(name)), reference=reference(name))
    assert (report.verdict, report.exit, report.failed) == ("MATCH", 0, [])
    assert [stage.name for stage in report.stages] == list(STAGES)
    assert {item.what for item in report.not_judged} <= {"text", "serving", *NO_SUCH_MODES}
    assert not [item for item in report.not_judged if item.required]
    probes = next(stage for stage in report.stages if stage.name == "probes")
    assert max(measure.error for measure in probes.measures) < 2e-6
    assert all(entry["visited"] == entry["of"] for entry in report.coverage["experts"].values())
    assert all(entry["crossed_twice"] for entry in report.coverage["windows"])


@pytest.mark.parametrize("name", KINDS)
def test_tiny_checkpoint_of_each_kind_passes(
    name: str, checkpoint: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    report = run_check(options(checkpoint(name)), reference=reference(name))
    assert (report.verdict, report.exit, report.failed) == ("MATCH", 0, [])
    assert not [item for item in report.not_judged if item.required]
    probes = next(stage for stage in report.stages if stage.name == "probes")
    assert all(measure.ok for measure in probes.measures)
    selecting = [entry for entry in report.coverage["selections"] if entry["left_out"]]
    places = [measure for measure in probes.measures if measure.column.endswith(" selection")]
    assert len(places) >= len(selecting)
    assert all(entry["closed_twice"] for entry in report.coverage["compressed"])
    modes = {measure.column for stage in report.stages if stage.name == "modes" for measure in stage.measures}
    assert "again from a cached prefix" in modes


@pytest.mark.parametrize(("name", "seed"), [("qwen2", 3), ("qwen3_moe", 5)])
def test_other_seeds_pass(name: str, seed: int, tmp_path: Path) -> None:
    write_tiny(name, tmp_path / name, seed)
    report = run_check(options(tmp_path / name, seed=seed, stages=("audit", "pinned", "probes", "logits", "modes")))
    assert report.exit == 0


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_other_kernels_pass(
    name: str,
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "plain_ops.py").write_text(PLAIN_OPS)
    monkeypatch.syspath_prepend(tmp_path)
    report = run_check(options(checkpoint(name), plugins=("plain_ops",)), reference=reference(name))
    assert report.exit == 0


def test_config_that_changes_nothing_passes(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    import json
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(checkpoint("qwen3"), copy)
    config = json.loads((copy / "config.json").read_text()) | {"initializer_range": 0.5}
    (copy / "config.json").write_text(json.dumps(config))
    report = run_check(options(copy, reference=checkpoint("qwen3"), stages=("audit", "pinned", "probes", "logits")))
    assert report.failed == []


def test_stages_left_out_are_not_judged(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    report = run_check(options(checkpoint("qwen3"), stages=("audit", "pinned")), reference=reference("qwen3"))
    assert (report.verdict, report.exit) == ("NOT-JUDGED", 2)
    assert {item.what for item in report.not_judged if item.required} == {"probes", "logits", "modes"}
    assert {item.what for item in report.not_judged} == {"text", "probes", "logits", "greedy", "modes", "serving"}
