"""A decoder whose mixers and feed-forward blocks are transformers' own, for any that names its parts as most do."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rtp_kernel.batch import Build, ForwardBatch, ModelState
from rtp_kernel.components import Embedding, Linear, RMSNorm, parameter
from rtp_runtime.bridge import BridgedBlock, BridgedMixer, BridgedRotary, bridged_states, bridged_weights
from rtp_runtime.state import StateDescriptors
from rtp_runtime.weights import Axis, FromCheckpoint, Weight, WeightDescriptors


class Names:
    """Where transformers keeps the blocks of one model. Filled by subclasses."""

    rotary: str
    mlp: str
    parts: Any = None
    offset = 0.0
    window: int | None = None

    @staticmethod
    def mixer(config: Any, layer: int) -> tuple[str, str]:
        """(attribute, target) of the layer's mixer."""
        raise NotImplementedError


class Doge(Names):
    rotary = "transformers.models.doge.modeling_doge:DogeRotaryEmbedding"
    mlp = "transformers.models.doge.modeling_doge:DogeMLP"

    @staticmethod
    def mixer(config: Any, layer: int) -> tuple[str, str]:
        return "self_attn", "transformers.models.doge.modeling_doge:DogeAttention"


class Mistral(Names):
    rotary = "transformers.models.mistral.modeling_mistral:MistralRotaryEmbedding"
    mlp = "transformers.models.mistral.modeling_mistral:MistralMLP"
    window = 8

    @staticmethod
    def mixer(config: Any, layer: int) -> tuple[str, str]:
        return "self_attn", "transformers.models.mistral.modeling_mistral:MistralAttention"


class Qwen3Next(Names):
    rotary = "transformers.models.qwen3_next.modeling_qwen3_next:Qwen3NextRotaryEmbedding"
    mlp = "transformers.models.qwen3_next.modeling_qwen3_next:Qwen3NextSparseMoeBlock"
    parts = {
        "experts.gate_up_proj": ("experts.{expert}.gate_proj.weight", "experts.{expert}.up_proj.weight"),
        "experts.down_proj": ("experts.{expert}.down_proj.weight",),
    }
    offset = 1.0

    @staticmethod
    def mixer(config: Any, layer: int) -> tuple[str, str]:
        home = "transformers.models.qwen3_next.modeling_qwen3_next"
        if config.layer_types[layer] == "full_attention":
            return "self_attn", f"{home}:Qwen3NextAttention"
        return "linear_attn", f"{home}:Qwen3NextGatedDeltaNet"


class DecoderLayer(nn.Module):
    def __init__(self, names: type[Names], config: Any, layer: int) -> None:
        super().__init__()
        self.mixer, target = names.mixer(config, layer)
        self.states = tuple(bridged_states(target, config, layer, rotary=names.rotary))
        setattr(self, self.mixer, BridgedMixer(target, config, layer, states=self.states, window=names.window))
        self.mlp = BridgedBlock(names.mlp, config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=names.offset)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=names.offset)

    def given(self, tables: tuple[Tensor, ...], batch: ForwardBatch, views: Any) -> tuple[Any, ...]:
        """What the mixer takes after its input."""
        return (*((tables,) if self.mixer == "self_attn" else ()), batch, *(views[name] for name in self.states))

    def forward(self, hidden: Tensor, tables: tuple[Tensor, ...], batch: ForwardBatch, views: Any) -> Tensor:
        mixer = getattr(self, self.mixer)
        hidden = hidden + mixer(self.input_layernorm(hidden), *self.given(tables, batch, views))
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class ScaledLayer(DecoderLayer):
    """With a factor per channel on each residual."""

    def __init__(self, names: type[Names], config: Any, layer: int) -> None:
        super().__init__(names, config, layer)
        self.input_residual = parameter(config.hidden_size)
        self.post_attention_residual = parameter(config.hidden_size)

    def forward(self, hidden: Tensor, tables: tuple[Tensor, ...], batch: ForwardBatch, views: Any) -> Tensor:
        mixer = getattr(self, self.mixer)
        hidden = self.input_residual * hidden + mixer(self.input_layernorm(hidden), *self.given(tables, batch, views))
        output: Tensor = self.post_attention_residual * hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Model(nn.Module):
    def __init__(self, names: type[Names], layer_class: Any, config: Any) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layer_class(names, config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=names.offset)
        self.rotary_emb = BridgedRotary(names.rotary, config)

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        hidden = self.embed_tokens(batch.input_ids)
        tables = self.rotary_emb(batch.positions)
        for layer, views in zip(self.layers, state, strict=True):
            hidden = layer(hidden, tables, batch, views)
        output: Tensor = self.norm(hidden)
        return output


class BridgedForCausalLM(nn.Module):
    names: type[Names]
    layer_class: Any = DecoderLayer

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__()
        self.model = Model(self.names, self.layer_class, config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        output: Tensor = self.model(batch, state)
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.lm_head(hidden)
        return output


def weights(names: type[Names], config: Any, extra: tuple[str, ...] = ()) -> WeightDescriptors:
    vocabulary, hidden = Axis("vocab", config.vocab_size), config.hidden_size
    layers = range(config.num_hidden_layers)
    found = [
        Weight(parameter=name, source=FromCheckpoint(name, (vocabulary, hidden)))
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    ]
    found.append(Weight(parameter="model.norm.weight", source=FromCheckpoint("model.norm.weight", (hidden,))))
    for norm in ("input_layernorm.weight", "post_attention_layernorm.weight", *extra):
        name = "model.layers.{layer}." + norm
        found.append(Weight(parameter=name, source=FromCheckpoint(name, (hidden,)), over={"layer": layers}))
    for layer in layers:
        place = f"model.layers.{layer}."
        attribute, target = names.mixer(config, layer)
        found += bridged_weights(target, config, layer, prefix=f"{place}{attribute}.")
        found += bridged_weights(names.mlp, config, prefix=f"{place}mlp.", parts=names.parts)
    return WeightDescriptors(*found)


def states(names: type[Names], config: Any) -> StateDescriptors:
    targets = [names.mixer(config, layer)[1] for layer in range(config.num_hidden_layers)]
    return StateDescriptors(
        [
            bridged_states(target, config, layer, rotary=names.rotary, window=names.window)
            for layer, target in enumerate(targets)
        ]
    )
