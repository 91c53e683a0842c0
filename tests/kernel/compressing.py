"""Steps of several requests over compressed states: what each request was given, and where its states lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rtp_kernel.batch import ForwardBatch, GroupBatch, StateView

NAN = float("nan")


@dataclass
class Requests:
    """The tokens that each of a few requests holds, in blocks and slots of which all others are full of NaN."""

    count: int
    ratio: int
    block_size: int
    blocks_each: int = 16
    held: list[int] = field(init=False)
    slot: list[int] = field(init=False)
    spare: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.held = [0] * self.count
        self.slot = [0] * self.count
        self.spare = list(range(1, 4 * self.count + 20))
        order = torch.randperm(self.count * self.blocks_each, generator=torch.Generator().manual_seed(3)) + 1
        self.table = order.view(self.count, self.blocks_each).int()

    def blocks(self, dim: int, ratio: int = 1) -> StateView:
        """A block state with nothing in it but NaN."""
        data = torch.full((self.count * self.blocks_each + 1, self.block_size // ratio, dim), NAN)
        data[0] = 0
        return StateView(data, 0, ratio)

    def slots(self, initial: float, *axes: int) -> StateView:
        data = torch.full((4 * self.count + 20, *axes), NAN)
        data[0] = initial
        return StateView(data, 1)

    def step(
        self, lens: Sequence[int], decodes: int = 0, padding: int = 0, copies: Sequence[tuple[int, int]] = ()
    ) -> ForwardBatch:
        """`lens[r]` new tokens of request r; `copies` (request, tokens of this step) leave a copy of its slot state.

        Every request writes another slot than it reads; the slots of the copies are `self.copied`, in order.
        """
        starts = torch.tensor([0, *lens]).cumsum(0)
        index = torch.cat([*(torch.arange(h, h + n) for h, n in zip(self.held, lens, strict=True))])
        request = torch.repeat_interleave(torch.arange(self.count), torch.tensor(lens))
        blocks = self.table[request, index // self.block_size].long()
        mapping = {}
        for ratio in {1, self.ratio}:
            place = blocks * (self.block_size // ratio) + index % self.block_size // ratio
            place = place.masked_fill((index + 1) % ratio != 0, -1)
            mapping[ratio] = torch.cat((place, torch.full((padding,), -1)))
        read, write = list(self.slot), [self.spare.pop() if n else 0 for n in lens]
        self.copied = [self.spare.pop() for _ in copies]
        snapshots = [(int(starts[r]) + n - 1, slot) for (r, n), slot in zip(copies, self.copied, strict=True)]
        for r, n in enumerate(lens):
            self.held[r] += n
            self.slot[r] = write[r] if n else self.slot[r]
        return ForwardBatch(
            input_ids=torch.zeros(len(index) + padding, dtype=torch.long),
            index=torch.cat((index, torch.full((padding,), -1))),
            positions=torch.cat((index, torch.zeros(padding, dtype=torch.long))),
            request=torch.cat((request, torch.zeros(padding, dtype=torch.long))),
            query_start=starts.int(),
            seq_lens=torch.tensor(self.held, dtype=torch.int32),
            groups=(
                GroupBatch(block_size=self.block_size, block_table=self.table.clone(), slot_mapping=mapping),
                GroupBatch(
                    read=torch.tensor(read),
                    write=torch.tensor(write),
                    snapshots=torch.tensor([*snapshots, (-1, -1)]),
                ),
            ),
            num_decodes=decodes,
            num_decode_tokens=sum(lens[:decodes]),
            query_lens=tuple(lens),
            kv_lens=tuple(self.held),
        )

    def rows(self, batch: ForwardBatch, parts: Sequence[Tensor]) -> Tensor:
        """The step's rows [T, ...] of each request's tokens [tokens, ...], with NaN in padding rows."""
        ends, lens = batch.kv_lens, batch.query_lens
        rows = torch.cat([part[end - n : end] for part, end, n in zip(parts, ends, lens, strict=True)])
        padding = batch.num_tokens - len(rows)
        return torch.cat((rows, torch.full((padding, *rows.shape[1:]), NAN)))

    def entries(self, view: StateView, request: int) -> Tensor:
        """All entries [entries, dim] that the request has in the state."""
        flat = view.data[self.table[request].long()].flatten(0, 1)
        return flat[: self.held[request] // view.tokens_per_entry]
