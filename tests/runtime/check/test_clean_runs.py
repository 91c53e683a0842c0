"""Clean runs pass, legitimate differences included: other kernels, other seeds, loops over experts, larger batches.

Every stage runs here for a dense and a sparse model, the required ones for one model of each kind of state. tools/alone
checks the tiny checkpoints of every model up to their logits; tools/faults checks them whole, under three seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from check_faults.clean import PLAIN_OPS

from rtp_runtime.check import STAGES, CheckOptions, run_check
from rtp_runtime.check.options import REQUIRED
from rtp_runtime.check.reference import Reference
from rtp_runtime.testing.tiny_models import write_tiny

LENGTHS = (10, 14, 40)
KINDS = ("qwen3_next", "deepseek_v32", "deepseek_v4", "minimax_m3_vl")
"""Recurrences, selections of tokens, blocks and entries, compressed context, residual streams, wrappers."""
PLAIN = ("qwen2", "qwen3_moe")
NO_SUCH_MODES = ("restored from a snapshot", "kernels: plain references", "captured graphs", "parallel ranks")
"""Of models that keep no state per request, and whose kernels have two sets only; and what does not exist yet."""


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
    report = run_check(options(checkpoint(name), stages=REQUIRED), reference=reference(name))
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
    assert name != "qwen3_next" or "restored from a snapshot" in modes


def test_another_seed_passes(tmp_path: Path) -> None:
    write_tiny("qwen3_moe", tmp_path / "model", 5)
    assert run_check(options(tmp_path / "model", seed=5, stages=REQUIRED)).exit == 0


def test_other_kernels_pass(
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "plain_ops.py").write_text(PLAIN_OPS)
    monkeypatch.syspath_prepend(tmp_path)
    asked = options(checkpoint("qwen3_moe"), plugins=("plain_ops",), stages=REQUIRED)
    assert run_check(asked, reference=reference("qwen3_moe")).exit == 0


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
