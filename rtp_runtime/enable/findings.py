"""What was recognised of a reference: facts proven on recorded tensors, from which a model file is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rtp_runtime.enable.blocks import Block, ByLayer, Norm
from rtp_runtime.enable.blocks.bridge import Bridge, constant
from rtp_runtime.errors import RtpError


class UnrecognisedError(RtpError):
    """A block that cannot be rebuilt from components: which, why, and what it would need."""

    def __init__(self, block: str, reason: str, needs: str) -> None:
        super().__init__(f"{block}: {reason} It would need {needs}.")
        self.block = block
        self.reason = reason
        self.needs = needs


@dataclass(frozen=True)
class Step:
    """One call in a decoder layer: `name`'s input is the sum of factors times earlier values."""

    name: str
    inputs: dict[str, float]
    residual: dict[str, float] | None = None
    """What the block itself adds its result to, where it is handed that."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer as a straight-line program over its blocks; "hidden" is what it was given."""

    class_name: str
    blocks: Mapping[str, Block]
    """By attribute name, in the order in which they run."""
    steps: tuple[Step, ...]
    output: dict[str, float]


@dataclass(frozen=True)
class Program:
    """Steps outside the layers; the result is a sum of their values."""

    steps: tuple[Step, ...]
    output: dict[str, float]


@dataclass(frozen=True)
class Kind:
    """A kind of layers: one program, with a class of its own in the model file."""

    class_name: str
    blocks: Mapping[str, Block | ByLayer]
    steps: tuple[Step, ...]
    output: dict[str, float]
    condition: str | None = None
    """Code over `config` and `layer` that is true for its layers; None in the last kind."""

    def choices(self, name: str) -> list[Block]:
        """The blocks that stand under this name in some layer."""
        block = self.blocks[name]
        return block.values() if isinstance(block, ByLayer) else [block]


@dataclass(frozen=True)
class Part:
    """A block, its name in a layer, and in which layers it stands."""

    name: str
    block: Block
    condition: str | None = None
    """None = in every layer."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Names of its parameters inside the layer that checkpoints call otherwise."""


@dataclass(frozen=True)
class Rope:
    """The rotary tables of the model."""

    class_name: str
    name: str
    dim: str | None = None
    """Code of how many dimensions of a head are turned; None = all."""
    by_layer_type: bool = False
    parameters: str = "rope_parameters(config)"
    """Code of the table's parameters, where there is one for all layers."""
    wide: bool = False
    """Angles stay float32 whatever the model's dtype."""
    target: str | None = None
    """The reference's own module, where only bridged blocks take tables."""


@dataclass(frozen=True)
class Decoder:
    """All that a model file needs."""

    architecture: str
    model_class: str
    model_name: str
    embedding_name: str
    layers_name: str
    head_name: str
    head_bias: bool
    kinds: tuple[Kind, ...]
    parts: tuple[Part, ...]
    states: ByLayer
    """Of each layer: name -> code of the descriptor."""
    outer: Mapping[str, Block]
    """Modules beside the layers but for the embedding of tokens, by attribute name."""
    before: Program
    """From "tokens", the embedded ids, to what the first layer is given."""
    after: Program
    """From "hidden", what the last layer gave, to what the head is given."""
    rope: Rope | None
    tied: bool
    embedding_dim: str = "config.hidden_size"
    head_dim: str = "config.hidden_size"
    outer_renames: Mapping[str, str] = field(default_factory=dict)
    """Whole names of parameters outside the layers that checkpoints call otherwise."""
    hub_prefixes: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names -> what checkpoints have there."""
    embedding_class: str | None = None
    embedding_rounds: bool = True
    """Its factor is rounded to the rows' dtype first."""
    embedding_scale: str | None = None
    hidden_scale: str | None = None
    head_scale: str | None = None
    """What the head is given is multiplied by it."""
    logit_scale: str | None = None
    logit_soft_cap: str | None = None
    residual_factors: dict[float, str] = field(default_factory=dict)
    """Factor seen in the small copy -> its code."""
    wide_stream: bool = False
    """The residual stream is added up in float32 whatever the model's dtype."""
    pinned: dict[str, object] = field(default_factory=dict)
    """Config keys that the reference reads and the model file does not, with the value it was written for."""

    @property
    def blocks(self) -> list[Block]:
        """Every block of the layers that is no norm, in order."""
        return [part.block for part in self.parts if not isinstance(part.block, Norm)]

    @property
    def bridged(self) -> list[Bridge]:
        """The blocks that are transformers' own."""
        return [block for block in self.blocks if isinstance(block, Bridge)]

    @property
    def targets(self) -> dict[str, str]:
        """The constants of bridged blocks, and what they hold."""
        rotary = {constant(self.rope.class_name): self.rope.target} if self.rope and self.rope.target else {}
        return {name: target for block in self.bridged for name, target in block.targets.items()} | rotary

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the states that some layer has."""
        return tuple(dict.fromkeys(name for states in self.states.values() for name in states))
