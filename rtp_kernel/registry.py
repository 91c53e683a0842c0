"""Which implementations of an op exist, which one is taken for a context, and why.

An op is known by name. Its plain-torch reference is always the last candidate, so that everything runs everywhere.
Nothing here imports torch: a plugin may register implementations in a process that never computes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class OpContext:
    """What an implementation may decide on. Grows only by fields with defaults."""

    device: str
    dtype: torch.dtype
    weight_format: str = "plain"
    shapes: Mapping[str, int] = field(default_factory=dict)
    """Local sizes by name: heads, kv heads, head dim, in, out, experts …"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the component asks of the op: window, sinks, soft cap, activation …"""
    block_size: int = 0
    """Tokens per block of the states; 0 = unknown, or of several sizes."""
    regime: str = "any"
    captured: bool = False
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Support:
    """An answer of `supports`: yes, or no with reasons."""

    ok: bool
    reasons: tuple[str, ...] = ()

    @staticmethod
    def unless(*reasons: str | bool | None) -> Support:
        """Yes if no reason (a non-empty string) is given: `Support.unless(cpu_only and "runs on the CPU only")`."""
        given = tuple(reason for reason in reasons if isinstance(reason, str) and reason)
        return Support(not given, given)


class Implementation(Protocol):
    """One way to compute an op.

    Optional members: `prepare(weight) -> prepared`, called once after loading, whose result the component passes in
    place of the weight, and `prepared_bytes(weight)`, the memory that this takes; where its inverse is exact,
    `restore(prepared, dtype)` and `release(prepared)`, the prepared form without the logical weight;
    `plan(batch, kv, span, window) -> plan`, called once per step and group, whose result is passed as `plan=`.
    """

    name: str

    def supports(self, context: OpContext) -> Support: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


OpFunction = Callable[..., Any]


class OpSelectionError(ValueError):
    """No implementation of an op serves a context, or the op (or an implementation) does not exist."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The plain-torch reference of an op: supports everything except, for some ops, determinism."""

    target: str
    """"pkg.module:function"."""
    row_independent: bool
    """Whether a row's result is bit-equal whatever the batch, the padding and the chunks (tested)."""
    name: str = "reference"

    def supports(self, context: OpContext) -> Support:
        refused = context.deterministic and not self.row_independent
        return Support.unless(refused and "its result for a row may depend on the other rows")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return resolve(self.target)(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Selection:
    """The implementation taken, and those that refused before it, with their reasons."""

    implementation: Implementation
    refused: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision taken at load, for `rtp inspect`."""

    component: str
    op: str
    regime: str
    implementation: str
    refused: tuple[tuple[str, tuple[str, ...]], ...]


def resolve(target: str) -> Any:
    """The object that "pkg.module:name" names. Raises `OpSelectionError` when it is not there."""
    module_name, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        reason = f'op implementation "{target}" cannot be imported: {error}; expected "package.module:name"'
        raise OpSelectionError(reason) from error


class OpRegistry:
    """op name -> candidates. The latest added is asked first, the reference last."""

    def __init__(self, references: Mapping[str, Reference] | None = None) -> None:
        self._references = dict(references or {})
        self._added: dict[str, list[Implementation | str]] = {}

    def add(self, op: str, implementation: Implementation | str) -> None:
        """Add a candidate: an object, or "pkg.module:name" of one (or of its class), imported when first asked."""
        if isinstance(implementation, str) and implementation.count(":") != 1:
            raise OpSelectionError(f'op "{op}": "{implementation}" is no "package.module:name"')
        self._added.setdefault(op, []).append(implementation)

    def ops(self) -> tuple[str, ...]:
        """Names of all ops."""
        return tuple(dict.fromkeys((*self._references, *self._added)))

    def reference(self, op: str) -> Reference:
        """The op's reference. Raises `OpSelectionError` when the op is unknown."""
        if op not in self._references:
            raise OpSelectionError(f'op "{op}" has no reference; ops with one: {", ".join(sorted(self._references))}')
        return self._references[op]

    def implementations(self, op: str) -> tuple[Implementation, ...]:
        """All candidates in the order they are asked."""
        added = self._added.get(op, [])
        for place, entry in enumerate(added):
            if isinstance(entry, str):
                found = resolve(entry)
                added[place] = found() if isinstance(found, type) else found
        resolved = tuple(cast(Implementation, entry) for entry in reversed(added))
        last = (self._references[op],) if op in self._references else ()
        if not resolved and not last:
            raise OpSelectionError(f'op "{op}" is unknown; known: {", ".join(sorted(self.ops()))}')
        return (*resolved, *last)

    def explain(self, op: str, context: OpContext) -> tuple[tuple[str, Support], ...]:
        """What every candidate answers to this context, in the order they are asked."""
        return tuple((candidate.name, candidate.supports(context)) for candidate in self.implementations(op))

    def select(self, op: str, context: OpContext) -> Selection:
        """The first candidate that supports the context. Raises `OpSelectionError` with every reason when none does."""
        refused: list[tuple[str, tuple[str, ...]]] = []
        for candidate in self.implementations(op):
            support = candidate.supports(context)
            if support.ok:
                return Selection(candidate, tuple(refused))
            refused.append((candidate.name, support.reasons))
        reasons = "; ".join(f"{name}: {', '.join(why)}" for name, why in refused)
        mode = "deterministic " if context.deterministic else ""
        where = f'{context.device}, {context.dtype}, regime "{context.regime}"'
        raise OpSelectionError(f'no {mode}implementation of op "{op}" for {where}: {reasons}')


class StepPlans:
    """What is computed once per step and used by many layers (masks, gather indices), kept for the latest batch only.

    Known by the batch's identity: a batch is frozen, and holding it keeps its identity from being reused.
    """

    def __init__(self) -> None:
        self._latest: tuple[object, dict[Any, Any]] = (None, {})

    def get(self, batch: object, key: Any, make: Callable[[], Any]) -> Any:
        """The plan under `key` for this batch, made on first request."""
        latest = self._latest  # one read and one write: another thread's step may come between
        if latest[0] is not batch:
            latest = self._latest = (batch, {})
        plans = latest[1]
        if key not in plans:
            plans[key] = make()
        return plans[key]


class OpTable:
    """What a runtime hands to components: it selects implementations for one device and dtype and remembers why.

    A checker overrides `select` and wraps the callable it returns; with `functools.wraps` the implementation stays
    reachable through `implementation_of`.
    """

    def __init__(
        self, registry: OpRegistry, *, device: str, dtype: torch.dtype, deterministic: bool = False, block_size: int = 0
    ) -> None:
        self.registry = registry
        self.device = device
        self.dtype = dtype
        self.deterministic = deterministic
        self.block_size = block_size
        self.choices: list[Choice] = []
        self.plans = StepPlans()

    def select(
        self,
        component: str,
        op: str,
        *,
        regime: str = "any",
        shapes: Mapping[str, int] | None = None,
        options: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
    ) -> OpFunction:
        """The implementation of `op` for `component`, as a callable. Raises `OpSelectionError` when none serves it."""
        context = OpContext(
            device=self.device,
            dtype=self.dtype if dtype is None else dtype,
            shapes=shapes or {},
            options=options or {},
            block_size=self.block_size,
            regime=regime,
            deterministic=self.deterministic,
        )
        selection = self.registry.select(op, context)
        self.choices.append(Choice(component, op, regime, selection.implementation.name, selection.refused))
        return selection.implementation


def implementation_of(function: OpFunction) -> Any:
    """The implementation behind a callable that a table returned, through any `functools.wraps` wrappers."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def default_registry() -> OpRegistry:
    """The ops of this package with their references and the implementations that ship with it."""
    registry = OpRegistry(
        {op: Reference(f"rtp_kernel.ops.{target}", rows) for op, (target, rows) in _REFERENCES.items()}
    )
    for op, targets in _BACKENDS.items():
        for target in targets:
            registry.add(op, f"rtp_kernel.backends.{target}")
    return registry


_REFERENCES: Mapping[str, tuple[str, bool]] = MappingProxyType(
    {
        "linear": ("linear:linear", False),
        "grouped_linear": ("linear:grouped_linear", False),
        "embedding": ("embedding:embedding", True),
        "rms_norm": ("norm:rms_norm", True),
        "layer_norm": ("norm:layer_norm", True),
        "gated_rms_norm": ("norm:gated_rms_norm", False),
        "causal_conv": ("conv:causal_conv", False),
        "delta_gates": ("delta_rule:delta_gates", False),
        "gated_delta_rule": ("delta_rule:gated_delta_rule", False),
        "previous_tokens": ("token_context:previous_tokens", True),
        "lightning_attention": ("lightning:lightning_attention", False),
        "linear_recurrence": ("linear_recurrence:linear_recurrence", False),
        "selective_scan": ("selective_scan:selective_scan", False),
        "state_space_scan": ("state_space_scan:state_space_scan", False),
        "rotary": ("rotary:rotary", True),
        "rotary_angles": ("rotary:rotary_angles", False),
        "activation": ("activation:activation", False),
        "gated_activation": ("activation:gated_activation", False),
        "write_kv": ("attention:write_kv", True),
        "write_state": ("state:write_state", True),
        "select": ("selection:select", True),
        "paged_attention": ("attention:paged_attention", False),
        "compress": ("compress:compress", False),
        "compressed_attention": ("compress:compressed_attention", False),
        "block_means": ("block_means:block_means", True),
        "pooled_keys": ("pooled_keys:pooled_keys", True),
        "index_scores": ("token_index:index_scores", False),
        "block_index_scores": ("block_index:block_index_scores", False),
        "latent_attention": ("latent_attention:latent_attention", False),
        "route": ("moe:route", False),
        "hyper_connection": ("hyper_connection:hyper_connection", False),
        "hyper_expand": ("hyper_connection:hyper_expand", False),
        "hyper_collapse": ("hyper_connection:hyper_collapse", False),
        "experts": ("moe:experts", False),
    }
)
"""op -> its reference, and whether that is row-independent."""

_BACKENDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "linear": ("cpu.rows:TiledLinear", "cpu.linear:WidenedLinear", "cpu.linear:PackedLinear"),
        "rms_norm": ("cpu.elementwise:RmsNorm",),
        "gated_rms_norm": ("cpu.slot_rows:GatedRmsNormRows",),
        "causal_conv": ("cpu.slot_rows:CausalConvRows",),
        "lightning_attention": ("cpu.slot_rows:LightningAttentionRows",),
        "linear_recurrence": ("cpu.slot_rows:LinearRecurrenceRows",),
        "selective_scan": ("cpu.slot_rows:SelectiveScanRows",),
        "state_space_scan": ("cpu.slot_rows:StateSpaceScanRows",),
        "delta_gates": ("cpu.slot_rows:DeltaGatesRows",),
        "gated_delta_rule": ("cpu.slot_rows:GatedDeltaRuleRows", "cpu.delta_rule:InPlaceDeltaRule"),
        "rotary": ("cpu.elementwise:RotaryHalf",),
        "rotary_angles": ("cpu.rows:RotaryAngles",),
        "activation": ("cpu.rows:Activation",),
        "gated_activation": ("cpu.rows:GatedActivation",),
        "write_kv": ("cpu.attention:WriteKv",),
        "paged_attention": (
            "cpu.rows:TiledAttention",
            "cpu.selected_rows:SelectedRows",
            "cpu.selected:SelectedPrefill",
            "cpu.selected:SelectedDecode",
            "cpu.attention:PrefillAttention",
            "cpu.attention:DecodeAttention",
            "flash_attn:FlashAttention",
        ),
        "select": ("cpu.selection:Select",),
        "latent_attention": (
            "cpu.latent_rows:LatentRows",
            "cpu.latent:LatentPrefill",
            "cpu.latent:LatentDecode",
        ),
        "index_scores": ("cpu.latent_rows:IndexScoreRows", "cpu.latent:IndexScoresDecode"),
        "grouped_linear": ("cpu.rows:TiledGroups",),
        "compress": ("cpu.compress_rows:CompressRows",),
        "compressed_attention": ("cpu.compress_rows:CompressedAttentionRows",),
        "hyper_connection": ("cpu.hyper_rows:HyperConnectionTiles",),
        "hyper_expand": ("cpu.hyper_rows:HyperExpandRows",),
        "hyper_collapse": ("cpu.hyper_rows:HyperCollapseTiles",),
        "block_index_scores": ("cpu.selected_rows:BlockIndexRows",),
        "route": ("cpu.rows:Route",),
        "experts": ("cpu.rows:TiledExperts", "cpu.moe:GroupedExperts"),
    }
)
"""op -> implementations, the one to ask first last."""
