"""Mistakes in the plain numbers and flags that the reference's modules hold: counts, switches, scales, limits."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from rtp_runtime.check.causes import patching
from rtp_runtime.check.causes.hypothesis import Fit, Hypothesis
from rtp_runtime.check.causes.operations import innocent
from rtp_runtime.check.causes.scene import Scene

SKIPPED = re.compile(
    r"training|_idx$|gradient|dropout|hidden_size|_dim$|vocab|padding|_features$|num_embeddings|kernel_size|groups$"
)
"""Sizes, which cannot be others without another shape, and what does not count while nothing is trained."""
FEW = 9
"""Counts below this are all tried."""
MOST = 64
"""Counts above this are sizes."""


def attribute_mistakes(scene: Scene) -> Iterator[Hypothesis]:
    """Flags turned, and counts one more or less."""
    for owner, name, value in _held(scene):
        others: list[Any] = []
        if isinstance(value, bool):
            others = [not value]
        elif isinstance(value, int) and 0 < value <= MOST:
            others = [value + 1, value - 1, value + 2, value - 2, value // 2, 2 * value, *range(min(value, FEW))]
        for other in dict.fromkeys(others):
            if other >= 0 and other != value:
                yield Hypothesis(
                    kind=f"value-{name}",
                    words=f"ours computes as if {name} were {other}; the reference has {value}",
                    fix=f"read {name} from the config in {scene.wheres()}",
                    mistake=partial(patching.attribute, owner, name, other),
                    cost=0.8 if isinstance(value, bool) else 1.05,
                )


def attribute_numbers(scene: Scene) -> Iterator[Fit]:
    """Numbers that are others."""
    for owner, name, value in _held(scene):
        if isinstance(value, float) and value:
            yield Fit(
                kind=f"value-{name}",
                words=f"ours computes as if {name} were {{}}; the reference has {value:.6g}",
                fix=f"read {name} from the config in {scene.wheres()}",
                mistake=partial(patching.attribute, owner, name),
                right=value,
                tries=(1.0, value * value, 1e-5, 1e-6) if value < 1e-3 else (1.0, value * value, value**0.5, 2 * value),
                log=value > 0,
                cost=1.6,
            )


def _held(scene: Scene) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, value) of the numbers and flags of the accused module, of those in it, and of its config."""
    clean = innocent(scene)
    for name, module in scene.children():
        if name in clean:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, (bool, int, float)) and not key.startswith("_") and not SKIPPED.search(key):
                yield module, key, value
        config = getattr(module, "config", None)
        for key in _config_keys(module) if config is not None else ():
            value = getattr(config, key, None)
            if isinstance(value, (bool, int, float)) and not SKIPPED.search(key):
                yield config, key, value


def _config_keys(module: nn.Module) -> list[str]:
    """Keys of the config that the module's code reads while it runs."""
    try:
        text = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return []
    return list(dict.fromkeys(re.findall(r"self\.config\.(\w+)", text)))
