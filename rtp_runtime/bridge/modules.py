"""Blocks of transformers inside a model of ours: same parameters under the same names, our packed tokens, our state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rtp_kernel.batch import ForwardBatch, StateView
from rtp_kernel.components import Binding, Component
from rtp_kernel.ops.attention import Span, request_rows
from rtp_kernel.ops.state import slot_runs
from rtp_runtime.bridge.cache import CONV, KEY, RECURRENT, Piece, RequestStates
from rtp_runtime.bridge.target import Target
from rtp_runtime.errors import ModelError, UnsupportedModelError

CACHES = ("cache", "past_key_values", "past_key_value", "cache_params", "layer_past")
"""What versions of transformers call a cache."""
TABLES = "position_embeddings"


class Bridged(Component):
    """A block of transformers. Its parts and parameters stand here under their own names, as if it were this module."""

    def __init__(self, target: str, config: Any, *args: Any) -> None:
        super().__init__()
        self.target = Target.parse(target)
        self._made_from = (config, args)
        block = self.target.build(config, *args)
        # Not registered as a child, which would put its name into every parameter's: the two share what they hold.
        object.__setattr__(self, "_block", block)
        self._modules, self._parameters, self._buffers = block._modules, block._parameters, block._buffers
        self._non_persistent_buffers_set = block._non_persistent_buffers_set

    @property
    def block(self) -> nn.Module:
        """The block of transformers."""
        found: nn.Module = self.__dict__["_block"]
        return found

    def bind(self, binding: Binding) -> None:
        """Make again what no checkpoint holds."""
        stored = self.block.state_dict().keys()
        if all(name in stored for name, _ in self.block.named_buffers()):
            return
        config, args = self._made_from
        with torch.device("cpu"):
            made = self.target.build(config, *args)
        for name, buffer in made.named_buffers():
            if name not in stored:
                path, _, leaf = name.rpartition(".")
                self.block.get_submodule(path)._buffers[leaf] = buffer.to(binding.device)

    def extra_repr(self) -> str:
        return f"transformers' own: {self.target}"


class BridgedBlock(Bridged):
    """A block without state: x [T, hidden] -> [T, hidden]; further tensors [T, …] are handed on."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        if not len(x):
            return x
        return _first(self.block.forward(x[None], *(other[None] for other in more))).reshape(x.shape)


class BridgedRotary(Bridged):
    """Rotary tables as transformers makes them: positions [T] -> its tables, each [T, …] in the model's dtype."""

    def __init__(self, target: str, config: Any, *args: Any) -> None:
        super().__init__(target, config, *args)
        self.dtype = torch.get_default_dtype()

    def bind(self, binding: Binding) -> None:
        super().bind(binding)
        self.dtype = binding.dtype

    def forward(self, positions: Tensor) -> tuple[Tensor, ...]:
        made = self.block.forward(torch.empty(1, dtype=self.dtype, device=positions.device), positions[None])
        return tuple(table[0] for table in (made if isinstance(made, tuple | list) else (made,)))


class BridgedMixer(Bridged):
    """Attention or recurrence of transformers, one request after another, over states in our pools.

    `states`: names of its states, as `bridged_states` declares them. `window`: of attention that sees the last tokens,
    or with `chunked` those of the same run of so many tokens.
    """

    def __init__(
        self,
        target: str,
        config: Any,
        layer: int,
        *,
        states: Sequence[str],
        window: int | None = None,
        chunked: bool = False,
    ) -> None:
        super().__init__(target, config, layer)
        self.states = tuple(states)
        self.window = window
        self.chunked = chunked
        self._names = argument_names(self.block)

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        """x [T, hidden] -> [T, hidden]; padding rows give zeros.

        `given`: the rotary tables, each [T, …], if the block takes them; the ForwardBatch; a StateView for each state.
        """
        tables: tuple[Tensor, ...] = given[0] if TABLES in self._names else ()
        batch, *bound = given[1:] if TABLES in self._names else given
        views = dict(zip(self.states, bound, strict=True))
        out = torch.zeros_like(x)
        for request, pieces in _requests(batch, views):
            slots = _read_slots(batch, views, request, pieces[0][0].first)
            for piece, copies in pieces:
                states = RequestStates(views, batch, piece, self.window, slots)
                rows = slice(piece.rows.start, piece.rows.stop)
                out[rows] = self._run(x[rows][None], states, tuple(table[rows][None] for table in tables))[0]
                self._check_written(states)
                _write_slots(views, slots, copies)
        return out

    def _run(self, x: Tensor, states: RequestStates, tables: tuple[Tensor, ...]) -> Tensor:
        piece = states.piece
        arguments: dict[str, Callable[[], Any]] = {
            TABLES: lambda: tables if len(tables) != 1 else tables[0],
            "attention_mask": lambda: causal_mask(states, x, self.chunked) if KEY in states.views else None,
            "position_ids": lambda: states.batch.positions[None, ..., piece.rows.start : piece.rows.stop],
            "cache_position": lambda: torch.arange(piece.first, piece.end, device=x.device),
            "use_cache": lambda: True,
        } | dict.fromkeys(CACHES, lambda: states)
        wanted = {name: make() for name, make in arguments.items() if name in self._names}
        return _first(self.block.forward(x, **wanted))

    def _check_written(self, states: RequestStates) -> None:
        """Every declared state went through our pools: what a block keeps elsewhere would be lost, or another's."""
        left = states.views.keys() - states.written - {name for name in states.slots if name.startswith(CONV)}
        if left:
            raise ModelError(
                f"{self.target} ran over {len(states.piece.rows)} tokens and did not write {', '.join(sorted(left))}, "
                "which its state descriptors declare: it keeps state that rtp does not see. Write this block by hand."
            )


def argument_names(block: nn.Module) -> frozenset[str]:
    """Names of the arguments of the block's forward after the first. Raises UnsupportedModelError for unknown needs."""
    parameters = list(inspect.signature(type(block).forward).parameters.values())[2:]
    known = {TABLES, "attention_mask", "position_ids", "cache_position", "use_cache", *CACHES}
    for parameter in parameters:
        required = parameter.default is inspect.Parameter.empty and parameter.kind not in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        )
        if required and parameter.name not in known:
            raise UnsupportedModelError(
                f"{type(block).__name__} needs the argument {parameter.name!r}, which a bridge cannot give: it gives "
                f"{', '.join(sorted(known))}. Write this block by hand."
            )
    return frozenset(parameter.name for parameter in parameters)


def causal_mask(states: RequestStates, like: Tensor, chunked: bool = False) -> Tensor:
    """[1, 1, tokens of the piece, tokens held]: 0 where a token is seen, the dtype's least number where not.

    `chunked`: the window is the run of tokens in which the token stands.
    """
    piece = states.piece
    seen = torch.arange(states.start, piece.end, device=like.device)
    asking = torch.arange(piece.first, piece.end, device=like.device)[:, None]
    distance = asking - seen
    hidden = (distance < 0) | (distance >= (states.window or piece.end))
    if chunked and states.window:
        hidden |= asking // states.window != seen // states.window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill(
        hidden, torch.finfo(like.dtype).min
    )[None, None]


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple | list) else output
    return found


Pieces = list[tuple[Piece, tuple[int, ...]]]
"""Pieces of one request in order, each with the slots that get a copy of the state after it."""


def _slot_names(views: Mapping[str, StateView]) -> list[str]:
    return [name for name in views if name.startswith((CONV, RECURRENT))]


def _requests(batch: ForwardBatch, views: Mapping[str, StateView]) -> Iterator[tuple[int, Pieces]]:
    """Every request with tokens in this step, cut where a copy of its slot states is to be left."""
    slots = _slot_names(views)
    if slots:
        for run in slot_runs(batch, views[slots[0]].group):
            start = run.pieces[0][0].start
            first = batch.kv_lens[run.request] - batch.query_lens[run.request]
            pieces = [(Piece(run.request, rows, first + rows.start - start), copies) for rows, copies in run.pieces]
            last, copies = pieces[-1]
            yield run.request, [*pieces[:-1], (last, (*copies, run.write))]
        return
    for request, rows in request_rows(batch, Span(range(batch.num_requests), range(batch.num_tokens))):
        yield request, [(Piece(request, rows, batch.kv_lens[request] - len(rows)), ())]


def _read_slots(batch: ForwardBatch, views: Mapping[str, StateView], request: int, first: int) -> dict[str, Tensor]:
    if not first:
        return {}
    found = {}
    for name in _slot_names(views):
        read = batch.groups[views[name].group].read
        assert read is not None
        found[name] = views[name].data[read[request]][None].clone()
    return found


def _write_slots(views: Mapping[str, StateView], slots: Mapping[str, Tensor], copies: tuple[int, ...]) -> None:
    for name, state in slots.items():
        for slot in copies:
            views[name].data[slot] = state[0].to(views[name].data.dtype)
