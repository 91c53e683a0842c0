"""Per-layer embeddings of Qwen4-Exp: hashed n-grams of token ids, gated into every residual stream.

Reads beside transformers' modeling_qwen4_exp.py, from `Qwen4ExpTextNGramEmbedding` on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components import Activation, CausalConv, Embedding, Linear, PreviousTokens, RMSNorm, parameter
from rtp_runtime.state import SlotState
from rtp_runtime.weights import Concat, Descriptor, FromCheckpoint, Weight

from .qwen2 import LAYER

PLE = LAYER + "ple."


def eos_token(config: Any) -> int:
    """What stands for a token before the first one, and before which an n-gram does not reach."""
    eos = config.eos_token_id
    return int(eos[0] if isinstance(eos, list) else eos)


def head_vocabularies(config: Any, ple_layer_index: int) -> list[int]:
    """The table size of each n-gram head: one prime after the other, from layer to layer."""
    heads = (config.ngram_size - 1) * config.heads_per_ngram
    primes: list[int] = []
    value = config.ngram_vocab_size_base - 1
    while len(primes) < (ple_layer_index + 1) * heads:
        value += 1
        if value > 1 and all(value % divisor for divisor in range(2, math.isqrt(value) + 1)):
            primes.append(value)
    return primes[-heads:]


def table_rows(config: Any, ple_layer_index: int) -> int:
    """Rows of the table that holds all heads of a layer, with its padding."""
    step: int = config.make_ngram_vocab_size_divisible_by
    return math.ceil(sum(head_vocabularies(config, ple_layer_index)) / step) * step


class Qwen4ExpTextNGramEmbedding(nn.Module):
    def __init__(self, config: Any, ple_layer_index: int) -> None:
        super().__init__()
        heads = (config.ngram_size - 1) * config.heads_per_ngram
        self.ngram_size, self.heads_per_ngram = config.ngram_size, config.heads_per_ngram
        self.eos_token_id = eos_token(config)
        self.layer_multipliers = parameter(config.ngram_size, dtype=torch.int64)
        self.ngram_heads_vocab_sizes = parameter(heads, dtype=torch.int64)
        self.ngram_heads_offsets = parameter(heads, dtype=torch.int64)
        self.ngram_embedding = Embedding(table_rows(config, ple_layer_index), config.ple_embed_dim // heads)
        self.previous_tokens = PreviousTokens(config.ngram_size - 1)

    def forward(self, batch: ForwardBatch, state: Mapping[str, StateView]) -> Tensor:
        previous = self.previous_tokens(batch, state["context"])  # [tokens, ngram size - 1]
        ended = (previous == self.eos_token_id).cumsum(dim=1) > 0  # an eos, and all that is before it
        shifted = torch.cat((batch.input_ids[:, None], previous.masked_fill(ended, self.eos_token_id)), dim=1)
        products = shifted * self.layer_multipliers  # wraps around, as in the reference
        mixed, hashes = products[:, 0], []
        for position in range(1, self.ngram_size):
            mixed = mixed ^ products[:, position]
            hashes.append(mixed)
        hashed = torch.stack(hashes, dim=1).repeat_interleave(self.heads_per_ngram, dim=1)  # [tokens, heads]
        ids = torch.remainder(hashed, self.ngram_heads_vocab_sizes) + self.ngram_heads_offsets
        embedded: Tensor = self.ngram_embedding(ids)  # [tokens, heads, dim]
        return embedded.flatten(1)


class Qwen4ExpTextPLELayer(nn.Module):
    def __init__(self, config: Any, ple_layer_index: int) -> None:
        super().__init__()
        hidden, streams, eps = config.hidden_size, config.hc_count, config.rms_norm_eps
        self.hidden_size, self.hc_count = hidden, streams
        self.ple_embedding = Qwen4ExpTextNGramEmbedding(config, ple_layer_index)
        self.key_proj = Linear(config.ple_embed_dim, streams * hidden)
        self.value_proj = Linear(config.ple_embed_dim, hidden)
        self.norm_key = RMSNorm(hidden, eps, 1.0, groups=streams)
        self.norm_query = RMSNorm(hidden, eps, 1.0, groups=streams)
        self.norm_conv = RMSNorm(hidden, eps, 1.0, groups=streams)
        kernel = config.ple_conv_kernel_size
        self.conv1d = CausalConv(streams * hidden, kernel, None, dilation=config.ngram_size)
        self.silu, self.sigmoid = Activation("silu"), Activation("sigmoid")

    def forward(self, hidden: Tensor, batch: ForwardBatch, state: Mapping[str, StateView]) -> Tensor:
        """hidden [tokens, streams * hidden] -> what is added to it."""
        embeddings = self.ple_embedding(batch, state)
        streams = (self.hc_count, self.hidden_size)
        key = self.norm_key(self.key_proj(embeddings)).unflatten(-1, streams)
        query = self.norm_query(hidden).unflatten(-1, streams)
        gate = (key * query).sum(dim=-1, keepdim=True) / math.sqrt(self.hidden_size)  # [tokens, streams, 1]
        gate = gate.abs().clamp_min(1e-6).sqrt() * gate.sign()
        weights = self.sigmoid(gate.squeeze(-1)).unsqueeze(-1)
        gated_value = (weights * self.value_proj(embeddings).unsqueeze(-2)).flatten(-2)
        output: Tensor = gated_value + self.silu(self.conv1d(self.norm_conv(gated_value), batch, state["ple_conv"]))
        return output


def ple_states(config: Any) -> dict[str, SlotState]:
    taps = (config.ple_conv_kernel_size - 1) * config.ngram_size
    return {
        "ple_conv": SlotState(axes={"channels": config.hc_count * config.hidden_size, "taps": taps}),
        "context": SlotState(axes={"tokens": config.ngram_size - 1}, dtype="int64", initial=eos_token(config)),
    }


def ple_weights(config: Any, *, sharded: bool) -> list[Descriptor]:
    """The tables cut into `split_ngram_parts` tensors, as on the hub, or whole, as transformers holds them."""
    hidden, streams, dim = config.hidden_size, config.hc_count * config.hidden_size, config.ple_embed_dim
    heads = (config.ngram_size - 1) * config.heads_per_ngram
    over = {"layer": [layer - 1 for layer in config.ple_layer_ids]}
    own = {
        "key_proj.weight": (streams, dim),
        "value_proj.weight": (hidden, dim),
        "conv1d.weight": (streams, 1, config.ple_conv_kernel_size),
        **dict.fromkeys(("norm_key.weight", "norm_query.weight", "norm_conv.weight"), (streams,)),
    }
    place = PLE + "ple_embedding."
    hashes = {"layer_multipliers": config.ngram_size, "ngram_heads_vocab_sizes": heads, "ngram_heads_offsets": heads}
    tables = [_table(config, index, layer - 1, sharded) for index, layer in enumerate(config.ple_layer_ids)]
    return [
        *(
            Weight(parameter=PLE + name, source=FromCheckpoint(PLE + name, dims), over=over)
            for name, dims in own.items()
        ),
        *(
            Weight(parameter=place + name, source=FromCheckpoint(place + name, (size,)), over=over, dtype="int64")
            for name, size in hashes.items()
        ),
        *tables,
    ]


def _table(config: Any, ple_layer_index: int, layer: int, sharded: bool) -> Weight:
    name = PLE + "ple_embedding.ngram_embedding."
    rows = table_rows(config, ple_layer_index)
    dim = config.ple_embed_dim // ((config.ngram_size - 1) * config.heads_per_ngram)
    step = math.ceil(rows / config.split_ngram_parts)
    shards = tuple(
        FromCheckpoint(f"{name}shard_{shard}.weight", (min(step, rows - start), dim))
        for shard, start in enumerate(range(0, rows, step))
    )
    source = Concat(shards) if sharded else FromCheckpoint(name + "weight", (rows, dim))
    return Weight(parameter=name + "weight", source=source, over={"layer": [layer]})
