"""Random packed steps over a paged state, and what dense attention of transformers says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import eager_attention_forward

from rtp_kernel.batch import ForwardBatch, GroupBatch, StateView
from rtp_kernel.ops.attention import spans


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and tests share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same draws in every run."""
    torch.manual_seed(0)


@dataclass(frozen=True, kw_only=True)
class Mix:
    """A step: each request's tokens held before and tokens new, the latter 1 for the leading decodes."""

    requests: Sequence[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block_size: int = 4
    window: int | None = None
    padding: int = 0
    """Padding rows behind the last request's."""
    gap: int = 0
    """Elements between two blocks that belong to nobody."""
    dtype: torch.dtype = torch.float32
    seed: int = 0
    decodes: int | None = None
    """Leading requests of one new token that are decodes; None = all of them."""
    q: Tensor = field(init=False)
    k: list[Tensor] = field(init=False)
    v: list[Tensor] = field(init=False)
    sinks: Tensor = field(init=False)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)
        lens = [held + new for held, new in self.requests]

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(self.dtype)

        object.__setattr__(self, "q", normal(self.num_tokens, self.heads, self.dim))
        object.__setattr__(self, "k", [normal(n, self.kv_heads, self.dim) for n in lens])
        object.__setattr__(self, "v", [normal(n, self.kv_heads, self.dim) for n in lens])
        object.__setattr__(self, "sinks", normal(self.heads))

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.requests) + self.padding

    def new(self, part: list[Tensor]) -> Tensor:
        """The rows of k or v that this step brings, with NaN in the padding rows."""
        rows = [part[i][held:] for i, (held, _) in enumerate(self.requests)]
        return torch.cat([*rows, torch.full((self.padding, self.kv_heads, self.dim), float("nan"), dtype=self.dtype)])

    def build(self, order: int = 0, poison: float = 0.0) -> tuple[ForwardBatch, StateView]:
        """The batch and a state that holds what came before; `order` permutes block ids, `poison` fills the rest."""
        blocks = [-(-(held + new) // self.block_size) for held, new in self.requests]
        total, width = 1 + sum(blocks), max(blocks, default=1)
        ids = torch.randperm(total - 1, generator=torch.Generator().manual_seed(order)) + 1
        table = torch.zeros(len(blocks), width, dtype=torch.int32)
        data = self._state(total, poison)
        slots, start = [], 0
        for request, (held, new) in enumerate(self.requests):
            own = ids[start : start + blocks[request]]
            start += blocks[request]
            table[request, : len(own)] = own
            place = torch.arange(held + new)
            data[own[place[:held] // self.block_size], place[:held] % self.block_size, 0] = self.k[request][:held]
            data[own[place[:held] // self.block_size], place[:held] % self.block_size, 1] = self.v[request][:held]
            slots.append(own[place[held:] // self.block_size] * self.block_size + place[held:] % self.block_size)
            self._free_behind_window(table, data, request, held, poison)
        slots.append(torch.full((self.padding,), -1))
        return self._batch(table, torch.cat(slots)), StateView(data, 0)

    def _state(self, total: int, poison: float) -> Tensor:
        entry = 2 * self.kv_heads * self.dim
        arena = torch.full((total * (self.block_size * entry + self.gap),), poison, dtype=self.dtype)
        size = (total, self.block_size, 2, self.kv_heads, self.dim)
        stride = (self.block_size * entry + self.gap, entry, self.kv_heads * self.dim, self.dim, 1)
        return arena.as_strided(size, stride)

    def _free_behind_window(self, table: Tensor, data: Tensor, request: int, held: int, poison: float) -> None:
        if self.window is not None:
            gone = max(0, held - self.window + 1) // self.block_size
            data[table[request, :gone].long()] = poison
            table[request, :gone] = 0

    def _batch(self, table: Tensor, slots: Tensor) -> ForwardBatch:
        lens = [new for _, new in self.requests]
        ends = [held + new for held, new in self.requests]
        index = torch.cat([*(torch.arange(h, h + n) for h, n in self.requests), torch.full((self.padding,), -1)])
        single = next((i for i, n in enumerate(lens) if n != 1), len(lens))
        decodes = single if self.decodes is None else min(single, self.decodes)
        request = torch.repeat_interleave(torch.arange(len(lens) + 1), torch.tensor([*lens, self.padding]))
        return ForwardBatch(
            input_ids=torch.zeros(self.num_tokens, dtype=torch.long),
            index=index,
            positions=index.clamp(min=0),
            request=request.where(index >= 0, torch.zeros_like(request)),
            query_start=torch.tensor([0, *lens]).cumsum(0).int(),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            groups=(GroupBatch(block_size=self.block_size, block_table=table, slot_mapping={1: slots}),),
            num_decodes=decodes,
            num_decode_tokens=decodes,
            query_lens=tuple(lens),
            kv_lens=tuple(ends),
        )

    def dense(self, attend: Callable[..., Any] = eager_attention_forward, **options: Any) -> Tensor:
        """What transformers' `attend` computes in float32 -> [tokens, heads, dim]; zeros for padding."""
        parts, row = [], 0
        module = SimpleNamespace(
            num_key_value_groups=self.heads // self.kv_heads, training=False, sinks=self.sinks.float()
        )
        for request, (held, new) in enumerate(self.requests):
            place = torch.arange(held + new)
            hidden = place > place[held:, None]
            if self.window is not None:
                hidden |= place <= place[held:, None] - self.window
            mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
            q, k, v = (
                part.float().transpose(0, 1)[None]
                for part in (self.q[row : row + new], self.k[request], self.v[request])
            )
            parts.append(attend(module, q, k, v, mask, scaling=self.dim**-0.5, **options)[0][0])
            row += new
        return torch.cat([*parts, torch.zeros(self.padding, self.heads, self.dim)])

    def run(self, write: Any, attend: Any, order: int = 0, poison: float = 0.0, **options: Any) -> Tensor:
        """Write, then attend span by span with the implementations given -> [tokens, heads, dim]."""
        batch, kv = self.build(order, poison)
        write(self.new(self.k), self.new(self.v), kv, batch)
        options = {"scale": self.dim**-0.5, "window": self.window, **options}
        parts = []
        for regime, span in spans(batch):
            op = attend[regime] if isinstance(attend, dict) else attend
            parts.append(op(self.q[span.rows.start : span.rows.stop], kv, batch, span, **options))
        return torch.cat(parts) if parts else self.q


@pytest.fixture(scope="session")
def mix() -> type[Mix]:
    """The builder of random steps."""
    return Mix


@dataclass(frozen=True, kw_only=True)
class SlotMix:
    """A step over states of which each request has one: what it read, how many tokens are new, where copies are due."""

    lens: Sequence[int]
    """New tokens of each request."""
    new: Sequence[int] = ()
    """Requests that read the null slot."""
    decodes: int = 0
    """Leading requests of the decode part (more than one token each: drafts)."""
    padding: int = 0
    copies: Sequence[tuple[int, int]] = ()
    """(request, tokens of this step): a copy of the state after them is due."""
    in_place: bool = True
    """Whether requests write the slot that they read."""

    @property
    def num_tokens(self) -> int:
        return sum(self.lens) + self.padding

    def rows(self, request: int) -> slice:
        start = sum(self.lens[:request])
        return slice(start, start + self.lens[request])

    def build(self, states: Tensor) -> tuple[ForwardBatch, StateView]:
        """States [requests, *axes] that are held before; zeros for new ones, NaN in every slot that nobody reads."""
        count = len(self.lens)
        order = torch.randperm(2 * count + len(self.copies), generator=torch.Generator().manual_seed(1)) + 2
        data = torch.full((len(order) + 3, *states.shape[1:]), float("nan"), dtype=states.dtype)
        data[0] = 0
        read, write, spare = order[:count].clone(), order[:count].clone(), order[count:]
        if not self.in_place:
            write, spare = spare[:count], spare[count:]
        data[read] = states
        for fresh in self.new:
            data[read[fresh]] = float("nan")
            read[fresh] = 0
        copies = [(self.rows(r).start + n - 1, int(slot)) for (r, n), slot in zip(self.copies, spare, strict=False)]
        snapshots = torch.tensor([*copies, (-1, -1)], dtype=torch.int64)
        group = GroupBatch(read=read, write=write, snapshots=snapshots)
        index = torch.cat([*(torch.arange(n) + 7 for n in self.lens), torch.full((self.padding,), -1)])
        request = torch.repeat_interleave(torch.arange(count + 1), torch.tensor([*self.lens, self.padding]))
        batch = ForwardBatch(
            input_ids=torch.zeros(self.num_tokens, dtype=torch.long),
            index=index,
            positions=index.clamp(min=0),
            request=request.where(index >= 0, torch.zeros_like(request)),
            query_start=torch.tensor([0, *self.lens]).cumsum(0).int(),
            seq_lens=torch.tensor([n + 7 for n in self.lens], dtype=torch.int32),
            groups=(group,),
            num_decodes=self.decodes,
            num_decode_tokens=sum(self.lens[: self.decodes]),
            query_lens=tuple(self.lens),
            kv_lens=tuple(n + 7 for n in self.lens),
        )
        return batch, StateView(data, 0)

    def compare(
        self,
        parts: Sequence[Tensor],
        shape: Sequence[int],
        op: Callable[[StateView, ForwardBatch], Tensor],
        theirs: Callable[[Sequence[Tensor], Tensor], tuple[Tensor, Tensor]],
        tolerance: float,
        state_tolerance: float,
    ) -> None:
        """`op` over parts [tokens, ...] and states of this shape is `theirs` over each request's parts and its state.

        Results may differ by `tolerance` of their largest. Padding rows are NaN, and come out as zeros.
        """
        for part in parts:
            part[self.num_tokens - self.padding :] = float("nan")
        states = torch.randn(len(self.lens), *shape)
        states[list(self.new)] = 0
        batch, view = self.build(states)
        got = op(view, batch)

        def run(request: int, length: int) -> tuple[Tensor, Tensor]:
            start = self.rows(request).start
            return theirs([part[start : start + length] for part in parts], states[request])

        for request, length in enumerate(self.lens):
            if length:
                want = run(request, length)[0]
                assert torch.allclose(got[self.rows(request)], want, rtol=0, atol=tolerance * float(want.abs().max()))
        assert bool((got[self.num_tokens - self.padding :] == 0).all())
        self.check(lambda request, length: run(request, length)[1], view, batch, state_tolerance)

    def check(
        self, after: Callable[[int, int], Tensor], view: StateView, batch: ForwardBatch, tolerance: float
    ) -> None:
        """`after(request, tokens)` is the state wanted; every slot that nobody was told to write is as it was."""
        group = batch.groups[0]
        assert group.read is not None and group.write is not None and group.snapshots is not None
        told = {0} | set(group.read.tolist())
        for request, length in enumerate(self.lens):
            if length:
                told.add(int(group.write[request]))
                assert torch.allclose(view.data[group.write[request]], after(request, length), rtol=0, atol=tolerance)
        for (request, length), (_, slot) in zip(self.copies, group.snapshots.tolist(), strict=False):
            told.add(slot)
            assert torch.allclose(view.data[slot], after(request, length), rtol=0, atol=tolerance)
        assert bool((view.data[0] == 0).all()), "the null slot was written"
        free = [slot for slot in range(len(view.data)) if slot not in told]
        assert bool(view.data[free].isnan().all()), "a slot was written that nobody asked for"


@pytest.fixture(scope="session")
def slot_mix() -> type[SlotMix]:
    """The builder of random steps over slots."""
    return SlotMix


@pytest.fixture(scope="session")
def slot_mixes() -> dict[str, SlotMix]:
    """Steps that every op with a state per request is tested with."""
    return {
        "prefill": SlotMix(lens=(70, 4, 1), new=(0, 1)),
        "decode": SlotMix(lens=(1, 1, 1), new=(1,), decodes=3),
        "mixture": SlotMix(lens=(1, 1, 130, 9), new=(3,), decodes=2, in_place=False),
        "copies": SlotMix(lens=(1, 1, 70, 9), decodes=2, copies=((1, 1), (2, 64), (2, 65), (2, 70), (3, 3))),
        "drafts": SlotMix(lens=(3, 1, 2, 5), new=(1,), decodes=3, copies=((0, 1), (0, 2), (2, 1), (0, 3))),
        "padding": SlotMix(lens=(1, 6), decodes=1, padding=4),
        "empty requests": SlotMix(lens=(1, 0, 5), decodes=1),
        "nothing real": SlotMix(lens=(), padding=3),
    }
