"""Checks of models that are larger than the machine, or have no weights: some layers, fewer experts, random values.

`prepared` turns what was asked into options for an ordinary check of a checkpoint that fits, in a folder of its own.
"""

from __future__ import annotations

import json
import math
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtp_runtime.check.cut.copying import Kept, write_cut
from rtp_runtime.check.cut.drawing import write_random
from rtp_runtime.check.cut.edits import TextPart
from rtp_runtime.check.cut.memory import estimate
from rtp_runtime.check.cut.plan import Plan, describe, make_plan, same_cut, text_part
from rtp_runtime.check.cut.telling import Numbering
from rtp_runtime.check.options import CheckOptions
from rtp_runtime.errors import UsageError
from rtp_runtime.model.config import ModelConfig

if TYPE_CHECKING:
    from rtp_runtime.check.report import CheckReport

__all__ = ["Prepared", "prepared"]

BESIDE = (".json", ".jinja", ".model", ".tiktoken", ".txt")
"""Files of a checkpoint that a cut one has too: the tokenizer's."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """A check that can be made."""

    options: CheckOptions
    """`model` and `reference` are directories with weights."""
    asked: CheckOptions
    pool: int | None = None
    """Bytes of weights that the reference may keep where they are to stay in their files; None: all are loaded."""
    layers: tuple[int, ...] = ()
    """The whole model's numbers of the layers, where some were left out."""
    cut: dict[str, Any] = field(default_factory=dict)
    """What was cut, as data."""

    def told(self, report: CheckReport, layers: list[str]) -> CheckReport:
        """The report with the names that the user knows. `layers`: dotted names of the layers that were checked."""
        if self.layers:
            report = Numbering(layers, self.layers).told(report)
        if self.cut:
            report = replace(report, conditions={**report.conditions, "cut": self.cut})
        return replace(report, model=str(self.asked.model), reference=str(self.asked.reference_path))


@contextmanager
def prepared(options: CheckOptions, say: Say, serve: Callable[[ModelConfig], object]) -> Iterator[Prepared]:
    """What `options` ask for, cut and drawn in a temporary folder where need be.

    `serve`: raises where no plugin serves a config; asked before weights are written.

    Raises:
        UsageError: no weights and no `random`, layers or experts that are not there, too little memory or disk.
        NotJudgedError: transformers cannot build the model.
        CheckpointError: the checkpoint does not belong to its config.
    """
    _require_weights(options)
    asked = options.random or options.layers is not None or options.experts is not None
    if not asked and _fits(options.model):
        yield Prepared(options, options)
        return
    part = _without_quantisation(text_part(options.model)) if options.random else text_part(options.model)
    plan = make_plan(part, options.layers, options.experts, say)
    pool = None if plan.estimate.holds_both else plan.estimate.pool
    if not plan.cuts and not options.random:
        yield Prepared(options, options, pool)
        return
    serve(ModelConfig(plan.part.edited(plan.edits), options.model))
    with _removed_when_ended(), tempfile.TemporaryDirectory(prefix="rtp-check-") as folder:
        model = _write(Path(folder) / "model", options.model, plan, options, say)
        other = None
        if options.reference is not None:
            theirs = text_part(options.reference)
            theirs = _without_quantisation(theirs) if options.random else theirs
            other = _write(Path(folder) / "reference", options.reference, same_cut(plan, theirs), options, say)
        ready = replace(options, model=model, reference=other, random=False, layers=None, experts=None)
        layers = plan.chosen.layers if plan.chosen is not None and plan.chosen.edits else ()
        yield Prepared(ready, options, pool, layers, describe(plan, options.random, options.seed))


@contextmanager
def _removed_when_ended() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that temporary folders are removed."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _require_weights(options: CheckOptions) -> None:
    for path in (options.model, options.reference):
        if path is None or options.random:
            continue
        bare = path.is_file() or (
            (path / "config.json").is_file() and not any(any(path.glob(pattern)) for pattern in WEIGHTS)
        )
        if bare:
            raise UsageError(f"{path} is a config without weights: give --random to check the model with random ones")


def _fits(model: Path) -> bool:
    """Whether the headers alone say that both models fit."""
    from rtp_runtime.errors import CheckpointError
    from rtp_runtime.weights.headers import read_headers

    try:
        tensors = read_headers(model).tensors.values()
    except CheckpointError:
        return True  # which the check itself will say
    return estimate(sum(math.prod(tensor.shape) for tensor in tensors)).holds_both


def _without_quantisation(part: TextPart) -> TextPart:
    """Random weights are not quantised, whatever the checkpoint's are."""
    return replace(part, raw={key: value for key, value in part.raw.items() if key != "quantization_config"})


def _write(target: Path, source: Path, plan: Plan, options: CheckOptions, say: Say) -> Path:
    """The cut checkpoint of one side."""
    target.mkdir()
    raw = plan.part.edited(plan.edits)
    (target / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")
    if source.is_dir():
        for file in source.iterdir():
            if file.suffix in BESIDE and file.name != "config.json" and not file.name.endswith(".index.json"):
                (target / file.name).symlink_to(file.resolve())
    weights = target / "model.safetensors"
    if options.random:
        dtype = ModelConfig(raw).declared_dtype()
        write_random(weights, plan.outline, dtype if dtype in ("float32", "float16") else "bfloat16", options.seed, say)
    else:
        write_cut(weights, source, plan.outline, _kept(plan), say)
    return target


def _kept(plan: Plan) -> Kept:
    total = plan.part.num_layers
    layers = plan.chosen.layers if plan.chosen is not None else tuple(range(total))
    experts = plan.routing.num_experts if plan.routing is not None else 0
    return Kept(layers, total, plan.experts or experts, experts)
