"""The toy model as a plugin would write it: state through views and group batches only, no fast kernel.

Layers: paged, window, compressed (one for each ratio, with its closing buffer), recurrent slot, per-token index with
selection. Integers modulo a prime in int64, the recurrent matrix in float64 so that poison stays poison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from rtp_kernel.batch import ForwardBatch, GroupBatch, ModelState, StateView
from rtp_runtime.state.descriptors import (
    CompressedState,
    PagedState,
    SlotState,
    StateDescriptor,
    StateDescriptors,
    WindowState,
)
from toy.numbers import (
    BUFFER_INITIAL,
    PRIME,
    SCORES,
    STATE_INITIAL,
    TOP_K,
    VOCAB,
    WINDOW,
    ToyConfig,
    coefficients,
)

Views = Mapping[str, StateView]


def state_descriptors(config: ToyConfig) -> StateDescriptors:
    compressed: list[dict[str, StateDescriptor]] = [
        {
            "kv": CompressedState(axes={"value": 1}, dtype="int64", tokens_per_entry=ratio),
            "buffer": SlotState(axes={"tokens": ratio}, dtype="int64", initial=BUFFER_INITIAL),
        }
        for ratio in config.ratios
    ]
    return StateDescriptors(
        [
            {"kv": PagedState(axes={"kv": 2}, dtype="int64")},
            {"kv": WindowState(axes={"value": 1}, dtype="int64", window=WINDOW)},
            *compressed,
            {"state": SlotState(axes={"rows": 2, "columns": 2}, dtype="float64", initial=STATE_INITIAL)},
            {
                "kv": PagedState(axes={"value": 1}, dtype="float64"),
                "index": PagedState(axes={"key": 1}, dtype="int64"),
            },
        ]
    )


class ToyForCausalLM(nn.Module):
    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        kinds = [PagedLayer, WindowLayer, *(CompressedLayer for _ in config.ratios), RecurrentLayer, SelectedLayer]
        self.layers = nn.ModuleList(kind(layer) for layer, kind in enumerate(kinds))

    def forward(self, batch: ForwardBatch, state: ModelState) -> Tensor:
        """[T, WIDTH] int64."""
        ids, index = batch.input_ids[:, None], batch.positions[:, None]
        stream = (_row(9, 0) * (ids + 1) + _row(9, 1) * (index + 1)) % PRIME
        for layer, views in zip(self.layers, state, strict=True):
            out = layer(stream, batch, views)
            stream = (stream + out[:, None] * layer.project(7) + (out * out % PRIME)[:, None]) % PRIME
        return stream

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, VOCAB] int64."""
        word = torch.arange(VOCAB)
        basis = torch.stack((word + 1, word * word + 3, (word + 2) ** 3))
        return (hidden[:, :, None] * basis).sum(1) % PRIME


class ToyLayer(nn.Module):
    """[T, WIDTH] -> [T], request by request; padding rows give 0."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def project(self, what: int) -> Tensor:
        return _row(self.layer, what)

    def dot(self, stream: Tensor, what: int) -> Tensor:
        """[T]"""
        return (stream * self.project(what)).sum(-1) % PRIME


class PagedLayer(ToyLayer):
    def forward(self, stream: Tensor, batch: ForwardBatch, views: Views) -> Tensor:
        query, key, value = (self.dot(stream, what) for what in range(3))
        _write(views["kv"], batch, torch.stack((key, value), -1))
        out = torch.zeros_like(query)
        for rows, row in _requests(batch):
            cache = _read(views["kv"], batch, row)  # [tokens, 2]
            place = torch.arange(len(cache))
            each = query[rows, None] * cache[:, 0] + (place + 1) * cache[:, 1]
            out[rows] = torch.where(place <= batch.index[rows, None], each, 0).sum(-1) % PRIME
        return out


class WindowLayer(ToyLayer):
    def forward(self, stream: Tensor, batch: ForwardBatch, views: Views) -> Tensor:
        query, key = self.dot(stream, 0), self.dot(stream, 1)
        _write(views["kv"], batch, key[:, None])
        out = torch.zeros_like(query)
        first_valid = _group(views["kv"], batch).first_valid
        assert first_valid is not None
        for rows, row in _requests(batch):
            index = batch.index[rows, None]
            assert first_valid[row] <= max(0, int(index[0]) - WINDOW + 1)
            cache = _read(views["kv"], batch, row)[:, 0]
            age = index - torch.arange(len(cache)) + 1
            each = (query[rows, None] + age) * cache % PRIME
            out[rows] = torch.where((age >= 1) & (age <= WINDOW), each, 0).sum(-1) % PRIME
        return out


class CompressedLayer(ToyLayer):
    """The buffer is a ring of the last `ratio` values: at the last place of a window it still has the one before it."""

    def forward(self, stream: Tensor, batch: ForwardBatch, views: Views) -> Tensor:
        query, value = self.dot(stream, 0), self.dot(stream, 1)
        kv, buffer = views["kv"], views["buffer"]
        ratio = kv.tokens_per_entry
        entries = torch.zeros_like(value)
        weights = torch.arange(1, ratio + 1)

        def advance(ring: Tensor, token: int) -> Tensor:
            place = int(batch.index[token]) % ratio
            before = ring[ratio - 1]
            ring = ring.clone()
            ring[place] = value[token]
            # Of a window's first ratio - 1 tokens the last place is untouched; the closing one reads it before.
            total = (ring * weights).sum() + 11 * before
            entries[token] = total % PRIME * (total % PRIME) % PRIME
            return ring

        _scan(buffer, batch, advance)
        _write(kv, batch, entries[:, None])
        out = torch.zeros_like(query)
        for rows, row in _requests(batch):
            cache = _read(kv, batch, row)[:, 0]
            window = torch.arange(len(cache))
            visible = window < (batch.index[rows, None] + 1) // ratio
            out[rows] = torch.where(visible, (query[rows, None] + window) * cache, 0).sum(-1) % PRIME
        return out


class RecurrentLayer(ToyLayer):
    def forward(self, stream: Tensor, batch: ForwardBatch, views: Views) -> Tensor:
        a, b, query = (self.dot(stream, what).double() for what in range(3))
        out = torch.zeros_like(query)

        def advance(state: Tensor, token: int) -> Tensor:
            (s00, s01), (s10, s11) = state
            top = torch.stack((s00 * a[token] + s01, s00 + s01 * b[token]))
            bottom = torch.stack((s10 * a[token] + s11, s10 * b[token] + s11 + 1))
            state = torch.stack((top, bottom)) % PRIME
            out[token] = (state.diagonal().sum() * query[token] + state[0, 1] + state[1, 0]) % PRIME
            return state

        _scan(views["state"], batch, advance)
        assert not out.isnan().any(), "poison was read"
        return out.long()


class SelectedLayer(ToyLayer):
    def forward(self, stream: Tensor, batch: ForwardBatch, views: Views) -> Tensor:
        query, value, wanted, key = (self.dot(stream, what) for what in (0, 1, 3, 4))
        _write(views["kv"], batch, value[:, None].double())
        _write(views["index"], batch, key[:, None])
        out = torch.zeros_like(query)
        for rows, row in _requests(batch):
            keys, cache = _read(views["index"], batch, row)[:, 0], _read(views["kv"], batch, row)[:, 0]
            place = torch.arange(len(keys))
            score = wanted[rows, None] * keys % PRIME % SCORES
            score = torch.where(place <= batch.index[rows, None], score, -1)
            # Stable, so that ties go to the lower position.
            order = score.sort(descending=True, stable=True).indices[:, :TOP_K]
            chosen = torch.where(score.gather(1, order) >= 0, (query[rows, None] + order + 1) * cache[order].long(), 0)
            out[rows] = chosen.sum(-1) % PRIME
        return out


def _row(layer: int, what: int) -> Tensor:
    return torch.tensor(coefficients(layer, what))


def _group(view: StateView, batch: ForwardBatch) -> GroupBatch:
    return batch.groups[view.group]


def _requests(batch: ForwardBatch) -> Iterator[tuple[slice, int]]:
    """(token rows, row of the request) of each request that has tokens."""
    starts = batch.query_start.tolist()
    for row, count in enumerate(batch.query_lens):
        if count:
            yield slice(starts[row], starts[row] + count), row


def _write(view: StateView, batch: ForwardBatch, values: Tensor) -> None:
    """Entries [T, *axes], where the mapping says that a token writes one."""
    mapping = _group(view, batch).slot_mapping[view.tokens_per_entry]
    keep = mapping >= 0
    entries = view.data.shape[1]
    view.data[mapping[keep] // entries, mapping[keep] % entries] = values[keep]


def _read(view: StateView, batch: ForwardBatch, row: int) -> Tensor:
    """[entries, *axes] of one request, in token order."""
    table = _group(view, batch).block_table
    assert table is not None
    return view.data[table[row].long()].flatten(0, 1)[: batch.kv_lens[row] // view.tokens_per_entry]


def _scan(view: StateView, batch: ForwardBatch, advance: Callable[[Tensor, int], Tensor]) -> None:
    """Carry a slot's state through each request's tokens, leaving it and the copies that are asked for."""
    group = _group(view, batch)
    assert group.read is not None and group.write is not None and group.snapshots is not None
    copies: dict[int, list[int]] = {}
    for token, slot in group.snapshots.tolist():
        if token >= 0:
            copies.setdefault(token, []).append(slot)
    for rows, row in _requests(batch):
        state = view.data[group.read[row]].clone()
        for token in range(rows.start, rows.stop):
            state = advance(state, token)
            for slot in copies.get(token, ()):
                view.data[slot] = state
        view.data[group.write[row]] = state
