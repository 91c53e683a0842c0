"""What was recognised of a reference: facts proven on recorded tensors, from which a model file is written."""

from __future__ import annotations

from dataclasses import dataclass, field

from rtp_runtime.errors import RtpError


class UnrecognisedError(RtpError):
    """A block that cannot be rebuilt from components: which, why, and what it would need."""

    def __init__(self, block: str, reason: str, needs: str) -> None:
        super().__init__(f"{block}: {reason} It would need {needs}.")
        self.block = block
        self.reason = reason
        self.needs = needs


@dataclass(frozen=True)
class Norm:
    """A norm module."""

    kind: str
    """"rms" or "layer"."""
    eps: str
    """Code over `config`, or a literal."""
    offset: bool = False
    """Multiplies by 1 + w."""
    bias: bool = False
    weight: bool = True


@dataclass(frozen=True)
class Projection:
    """A linear module of the reference, and which part of its output is meant."""

    name: str
    bias: bool
    start: int = 0
    size: int = 0
    whole: bool = True


@dataclass(frozen=True)
class Attention:
    """Grouped attention over paged keys and values."""

    class_name: str
    q: Projection
    k: Projection
    v: Projection
    out: Projection
    scale: str | None
    """Code over `config`; None = head_dim**-0.5."""
    soft_cap: str | None = None
    sinks: bool = False
    q_norm: str | None = None
    """Attribute name of the norm."""
    k_norm: str | None = None
    norm: Norm | None = None
    norm_flat: bool = False
    """Over all heads at once, before they are split."""
    norm_after_rotary: bool = False

    @property
    def fused(self) -> bool:
        return self.q.name == self.k.name == self.v.name


@dataclass(frozen=True)
class Mlp:
    """A feed-forward block: gated (gate, up, down), or plain (up, down)."""

    class_name: str
    activation: str
    """Code over `config`, or a quoted name."""
    up: Projection
    down: Projection
    gate: Projection | None = None
    width: str = "config.intermediate_size"

    @property
    def fused(self) -> bool:
        return self.gate is not None and self.gate.name == self.up.name


@dataclass(frozen=True)
class Step:
    """One call in a decoder layer: `name`'s input is the sum of factors times earlier values."""

    name: str
    inputs: dict[str, float]


@dataclass(frozen=True)
class Layer:
    """A decoder layer as a straight-line program; "hidden" is what it was given."""

    class_name: str
    attention_name: str
    mlp_name: str
    norms: dict[str, Norm]
    steps: tuple[Step, ...]
    output: dict[str, float]


@dataclass(frozen=True)
class Rope:
    """The rotary tables and how heads are turned."""

    class_name: str
    name: str
    layout: str
    partial: bool
    """Only the leading part of a head, `partial_rotary_factor`, is turned."""
    by_layer_type: bool = False


@dataclass(frozen=True)
class PerLayer:
    """What differs between layers: code over `config` and `layer`, or None where all agree."""

    window: str | None = None
    """Code of the window of every layer that has one."""
    window_if: str | None = None
    """Condition of having a window; None = every layer (when `window`)."""
    rotary_if: str | None = None
    """Condition of turning heads; None = every layer."""


@dataclass(frozen=True)
class Decoder:
    """All that a model file needs."""

    architecture: str
    model_class: str
    model_name: str
    embedding_name: str
    layers_name: str
    norm_name: str
    head_name: str
    head_bias: bool
    attention: Attention
    mlp: Mlp
    layer: Layer
    final_norm: Norm
    rope: Rope | None
    per_layer: PerLayer
    tied: bool
    embedding_class: str | None = None
    embedding_scale: str | None = None
    hidden_scale: str | None = None
    logit_scale: str | None = None
    logit_soft_cap: str | None = None
    residual_factors: dict[float, str] = field(default_factory=dict)
    """Factor seen in the small copy -> its code."""
    pinned: dict[str, object] = field(default_factory=dict)
    """Config keys that the reference reads and the model file does not, with the value it was written for."""
