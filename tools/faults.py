"""Seeded faults and clean runs in one process, each model loaded once; prints, and can write, the table."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from check_faults.catalogue import Fault
from check_faults.clean import PLAIN_OPS, CleanRun, clean_runs
from check_faults.everything import ALL
from check_faults.scoring import Score, score
from check_faults.table import page

from rtp_runtime.check.loading import load_reference, quiet_transformers
from rtp_runtime.check.reference import Reference
from rtp_runtime.testing.tiny_models import TINY_NAMES, write_tiny


class Models:
    """Tiny checkpoints and their references by name and seed, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._references: dict[tuple[str, int], Reference] = {}

    def checkpoint(self, name: str, seed: int) -> Path:
        path = self._folder / f"{name}-{seed}"
        if not path.exists():
            write_tiny(name, path, seed)
        return path

    def reference(self, name: str, seed: int) -> Reference:
        if (name, seed) not in self._references:
            self._references[name, seed] = load_reference(self.checkpoint(name, seed))
        return self._references[name, seed]

    def forget(self) -> None:
        """Of references only."""
        self._references.clear()


def main() -> int:
    """Run what was asked; exit status 1 when a target is missed."""
    arguments = _arguments()
    if arguments.read:
        return _write(arguments.write, [json.loads(file.read_text()) for file in arguments.read])
    torch.set_num_threads(1)
    chosen = [] if arguments.no_faults else [f for f in ALL if not arguments.names or f.name in arguments.names]
    with tempfile.TemporaryDirectory(prefix="rtp-faults-") as folder, quiet_transformers():
        sys.path.insert(0, folder)
        models = Models(Path(folder))
        scores = list(_faults(chosen, arguments.seeds, models, Path(folder)))
        runs = [] if arguments.names or arguments.no_clean else list(clean_runs(arguments.models, arguments.seeds))
        alarms = list(_clean(runs[arguments.part[0] :: arguments.part[1]], models, Path(folder)))
    results = {"faults": [_row(each) for each in scores], "clean": alarms}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    if arguments.write:
        _write(arguments.write, [results])
    print(summary(scores, alarms))
    return 0 if all(_good(each) for each in scores) and not any(alarm["alarm"] for alarm in alarms) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/faults", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="FAULT", help="only these faults, and no clean runs")
    parser.add_argument("--seeds", type=_numbers, default=(0, 1, 2), metavar="A,B", help="of weights (0,1,2)")
    parser.add_argument("--no-faults", action="store_true", help="clean runs alone")
    parser.add_argument("--no-clean", action="store_true", help="leave the clean runs out")
    parser.add_argument("--models", type=_names, default=TINY_NAMES, metavar="A,B", help="of the clean runs (all)")
    parser.add_argument("--part", type=_part, default=(0, 1), metavar="I/N", help="every Nth clean run, from the Ith")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table, as in docs/faults.md")
    parser.add_argument(
        "--read", type=Path, nargs="+", metavar="FILE", help="run nothing: take what --json has written"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every result there")
    return parser.parse_args()


def _write(file: Path | None, parts: Sequence[dict[str, list[dict[str, object]]]]) -> int:
    faults, clean = ([row for part in parts for row in part[name]] for name in ("faults", "clean"))
    text = page(sorted(faults, key=_place), sorted(clean, key=lambda row: str(row["what"])))
    if file is None:
        print(text)
    else:
        file.write_text(text, encoding="utf-8")
    return 0


def _place(row: dict[str, object]) -> tuple[int, int]:
    return [fault.name for fault in ALL].index(str(row["name"])), int(str(row["seed"]))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _part(text: str) -> tuple[int, int]:
    first, _, count = text.partition("/")
    return int(first), int(count)


def _faults(faults: Sequence[Fault], seeds: Sequence[int], models: Models, folder: Path) -> Iterator[Score]:
    """Model by model, so that each is loaded once and only one at a time."""
    for base in dict.fromkeys(fault.base for fault in faults):
        for seed in seeds:
            for fault in (each for each in faults if each.base == base):
                checkpoint, reference = models.checkpoint(base, seed), models.reference(base, seed)
                found = score(fault, seed, checkpoint, reference, folder / "fault")
                _say(found)
                yield found
        models.forget()


def _say(found: Score) -> None:
    words = "ok" if _good(found) else f"MISSED flagged={found.flagged} placed={found.placed} cause={found.cause!r}"
    print(f"{found.fault.name} seed {found.seed}: {words}; {found.named}", file=sys.stderr, flush=True)


def _good(found: Score) -> bool:
    return found.flagged and found.placed and found.explained


def _clean(runs: Sequence[CleanRun], models: Models, folder: Path) -> Iterator[dict[str, object]]:
    (folder / "clean_plain_ops.py").write_text(PLAIN_OPS)
    for number, run in enumerate(runs, 1):
        started, copy = time.monotonic(), folder / "clean"
        shutil.copytree(models.checkpoint(run.base, run.seed), copy)
        run.edit(copy)
        report = run.run(copy)
        shutil.rmtree(copy)
        alarm = "; ".join(f"{each.module}: {each.what} {each.error:.1e}" for each in report.failed[:3])
        print(f"clean {number}/{len(runs)} {run.base} {run.what}: {alarm or 'quiet'}", file=sys.stderr, flush=True)
        yield {"base": run.base, "seed": run.seed, "what": run.what, "verdict": report.verdict, "alarm": alarm,
               "seconds": round(time.monotonic() - started, 1)}  # fmt: skip


def _row(found: Score) -> dict[str, object]:
    fault = found.fault
    return {
        "name": fault.name, "row": fault.row, "base": fault.base, "stage": fault.stage, "at": fault.at,
        "effect": fault.effect if fault.effect != float("inf") else None, "expected_cause": fault.cause,
        "seed": found.seed, "flagged": found.flagged, "placed": found.placed, "cause": found.cause,
        "explained": found.explained, "named": found.named,
    }  # fmt: skip


def summary(scores: Sequence[Score], alarms: Sequence[dict[str, object]]) -> str:
    """The counts in words."""
    lines = []
    if scores:
        total = len(scores)
        parts = {"flagged": 0, "placed": 0, "explained": 0}
        for name in parts:
            parts[name] = sum(bool(getattr(each, name)) for each in scores)
        lines.append(", ".join(f"{name} {count} of {total} ({count / total:.1%})" for name, count in parts.items()))
    if alarms:
        lines.append(f"clean runs: {len(alarms)}, alarms: {sum(bool(alarm['alarm']) for alarm in alarms)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
