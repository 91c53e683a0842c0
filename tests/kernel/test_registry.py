"""Selection of implementations: order, reasons, lazy resolution, plans."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch

from rtp_kernel.registry import (
    OpContext,
    OpRegistry,
    OpSelectionError,
    OpTable,
    Reference,
    StepPlans,
    Support,
    default_registry,
    implementation_of,
)

REFERENCE = Reference("rtp_kernel.ops.linear:linear", row_independent=False)


class Doubling:
    """An implementation for one dtype."""

    name = "doubling"

    def supports(self, context: OpContext) -> Support:
        return Support.unless(context.dtype != torch.float64 and f"no {context.dtype}")

    def __call__(self, x: Any) -> Any:
        return 2 * x


def _context(dtype: torch.dtype = torch.float32, **fields: Any) -> OpContext:
    return OpContext(device="cpu", dtype=dtype, **fields)


def test_the_reference_is_asked_last_and_refusals_are_kept() -> None:
    registry = OpRegistry({"linear": REFERENCE})
    registry.add("linear", Doubling())
    selection = registry.select("linear", _context())
    assert selection.implementation is REFERENCE
    assert selection.refused == (("doubling", ("no torch.float32",)),)
    assert registry.select("linear", _context(torch.float64)).implementation.name == "doubling"
    assert [(name, support.ok) for name, support in registry.explain("linear", _context())] == [
        ("doubling", False),
        ("reference", True),
    ]


def test_the_latest_added_is_asked_first() -> None:
    class Tripling(Doubling):
        name = "tripling"

    registry = OpRegistry({"linear": REFERENCE})
    registry.add("linear", Doubling())
    registry.add("linear", Tripling())
    assert registry.select("linear", _context(torch.float64)).implementation.name == "tripling"


def test_strings_are_resolved_when_first_asked() -> None:
    registry = OpRegistry()
    registry.add("double", "nowhere.at_all:Thing")
    registry.add("linear", "rtp_kernel.backends.cpu.linear:PackedLinear")
    assert registry.implementations("linear")[0].name == "cpu_onednn_packed"
    with pytest.raises(OpSelectionError, match=r'"nowhere.at_all:Thing" cannot be imported.*"package.module:name"'):
        registry.implementations("double")
    with pytest.raises(OpSelectionError, match=r'is no "package.module:name"'):
        registry.add("linear", "no_colon")


def test_an_unknown_op_is_refused_with_the_known() -> None:
    with pytest.raises(OpSelectionError, match=r'op "fold" is unknown; known: .*embedding, '):
        default_registry().select("fold", _context())


def test_no_implementation_is_an_error_with_every_reason() -> None:
    registry = OpRegistry({"linear": REFERENCE})
    registry.add("linear", Doubling())
    with pytest.raises(OpSelectionError, match=r'no deterministic .*op "linear".*doubling: no .*reference: its result'):
        registry.select("linear", _context(deterministic=True))


def test_a_table_remembers_its_choices() -> None:
    table = OpTable(default_registry(), device="cpu", dtype=torch.float32, block_size=16)
    op = table.select("layers.0.mlp", "gated_activation", regime="any", options={"activation": "silu"})
    x = torch.randn(3, 8)
    assert torch.equal(op(x, x, "silu"), torch.nn.functional.silu(x) * x)
    choice = table.choices[-1]
    assert (choice.component, choice.op, choice.implementation) == ("layers.0.mlp", "gated_activation", "reference")
    assert choice.refused[0][0] == "cpu_row_chunks"


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_op_has_an_implementation_everywhere(device: str, dtype: torch.dtype) -> None:
    registry = default_registry()
    for op in registry.ops():
        for regime in ("any", "decode", "verify", "prefill"):
            assert registry.select(op, OpContext(device=device, dtype=dtype, regime=regime)).implementation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_op_has_a_deterministic_implementation_on_the_cpu(dtype: torch.dtype) -> None:
    registry = default_registry()
    for op in registry.ops():
        assert registry.select(op, _context(dtype, deterministic=True)).implementation


def test_no_deterministic_attention_elsewhere() -> None:
    table = OpTable(default_registry(), device="cuda", dtype=torch.float32, deterministic=True)
    with pytest.raises(OpSelectionError, match='op "paged_attention" for cuda'):
        table.select("attn", "paged_attention")


def test_an_implementation_is_found_behind_wrappers() -> None:
    inner = Doubling()

    @functools.wraps(inner)
    def recorded(x: Any) -> Any:
        return inner(x)

    assert implementation_of(recorded) is inner
    assert implementation_of(inner) is inner


def test_plans_are_made_once_per_batch_and_key() -> None:
    plans, made = StepPlans(), []

    def plan(batch: object, key: str) -> Any:
        return plans.get(batch, key, lambda: made.append(key) or len(made))

    first, second = object(), object()
    assert [plan(first, "a"), plan(first, "a"), plan(first, "b"), plan(second, "a"), plan(first, "a")] == [
        1,
        1,
        2,
        3,
        4,
    ]


def test_importing_the_registry_loads_no_torch() -> None:
    code = "import sys, rtp_kernel.registry as r; r.default_registry(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
