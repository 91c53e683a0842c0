"""The Hugging Face model as the reference: its logits, what it computes module by module, and its continuations.

It speaks our names: where its decoder stands elsewhere (inside a vision-language model), its dotted names are told as
ours (`use_names`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rtp_runtime.check.capture import Capture, ModuleRecorder, per_token, real_parts
from rtp_runtime.check.compare import tensors_of
from rtp_runtime.check.names import SAME_NAMES, Naming, find_layers
from rtp_runtime.check.usage import used_tensors
from rtp_runtime.model.config import stated_context

SMALL_MODEL = 20_000_000
"""Parameters."""
LARGE_MODEL = 1_000_000_000
SOME_TOKENS = 160
Tell = Callable[[str, tuple[Tensor, ...], int], None]
"""Hears of each module's outputs [rows, …] and the place of their first row in the prompt."""


@dataclass(frozen=True, slots=True)
class Defect:
    """A parameter that transformers could not fill from the checkpoint."""

    parameter: str
    reason: str


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the reference says after a prompt, token by token with its cache."""

    tokens: tuple[int, ...]
    logits: Tensor
    """[tokens, vocab]: from which each token was taken."""


@dataclass(frozen=True, slots=True)
class Feeding:
    """How tokens are fed: in which parts through a cache, and whether their positions are said."""

    parts: tuple[int, ...] = ()
    """Lengths; empty: everything at once, with no cache."""
    positions: bool = True


WHOLE = Feeding()


class Reference:
    """One loaded reference. All logits are float32 [tokens, vocab] on the CPU; all names are ours."""

    def __init__(
        self, path: Path, model: nn.Module, defects: Sequence[Defect] = (), unexpected: frozenset[str] = frozenset()
    ) -> None:
        self.path = path
        self.model: Any = model
        self._all_defects = tuple(defects)
        self.unexpected = unexpected
        """Tensors of the checkpoint that transformers does not use."""
        self.config: Any = model.config
        self.known: dict[Any, Any] = {}
        """Small results by their question, for callers that check many times against one reference."""
        forward = inspect.signature(type(model).forward).parameters
        self._cache_argument = "cache" if "cache" in forward else "past_key_values"
        self.keeps_cache = self._cache_argument in forward
        """Whether it can go on from what it computed before; a few old ones cannot."""
        self._cache: Any = None
        self.use_names(SAME_NAMES)

    def use_names(self, naming: Naming) -> None:
        """Speak of the decoder's modules by these names from now on."""
        self.naming = naming
        named = ((naming.ours_of(name), module) for name, module in self.model.named_modules())
        self.modules: dict[str, nn.Module] = {name: module for name, module in named if name}
        """Ours of all names -> module, in the order of declaration."""
        self.layers: Mapping[str, int] = {
            naming.ours_of(name) or name: index for name, index in find_layers(self.model).items()
        }
        """Dotted name of each decoder layer -> its index."""

    @property
    def is_outline(self) -> bool:
        """Whether it has no values, and so cannot run."""
        return any(parameter.is_meta for parameter in self.model.parameters())

    @property
    def is_streamed(self) -> bool:
        """Whether its weights stay in their files until they are used: then forwards are dear."""
        return False

    @property
    def used(self) -> frozenset[str]:
        """Names of the parameters and buffers that a text-only forward reads; of an outline all."""
        if "used" not in self.known:
            outline = self.is_outline
            names = self._stored() if outline else used_tensors(self.model, lambda: self.logits(self._some_tokens))
            self.known["used"] = frozenset(names)
        return frozenset(self.naming.ours_of(name) or name for name in self.known["used"])

    def _stored(self) -> list[str]:
        return [name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())]

    @property
    def defects(self) -> tuple[Defect, ...]:
        """Those that a text-only forward meets."""
        if not self._all_defects:
            return ()
        named = (Defect(self.naming.ours_of(d.parameter) or d.parameter, d.reason) for d in self._all_defects)
        return tuple(defect for defect in named if self.is_outline or defect.parameter in self.used)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Tables that no checkpoint holds."""
        stored = self.model.state_dict()
        for name, buffer in self.model.named_buffers():
            if name not in stored:
                yield self.naming.ours_of(name) or name, buffer

    def is_parameter(self, name: str) -> bool:
        """Whether a parameter has this name."""
        return any((self.naming.ours_of(other) or other) == name for other, _ in self.model.named_parameters())

    def stored_names(self) -> set[str]:
        """Parameters and buffers that a checkpoint holds."""
        return {self.naming.ours_of(name) or name for name in self.model.state_dict()}

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """Of the embedding, which is that of the residual stream."""
        dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        return dtype

    @property
    def is_small(self) -> bool:
        """Whether a forward costs so little that a check can afford many."""
        return self.num_parameters <= SMALL_MODEL

    @property
    def is_large(self) -> bool:
        """Whether a forward is so dear that a check makes as few as it can."""
        return self.is_streamed or self.num_parameters >= LARGE_MODEL

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def few_tokens(self) -> list[int]:
        """A short prompt, for questions to which the tokens do not matter."""
        return [token % self.vocab_size for token in (5, 7, 11)]

    @property
    def _some_tokens(self) -> list[int]:
        """A prompt that is long enough to close windows of tokens."""
        return [7 * place % self.vocab_size for place in range(min(SOME_TOKENS, self.max_positions))]

    @property
    def max_positions(self) -> int:
        config = self.config.get_text_config()
        return stated_context(lambda key: getattr(config, key, None)) or 4096

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], feeding: Feeding = WHOLE) -> Tensor:
        """Of all tokens, fed as asked."""
        return torch.cat([output[0] for _, output in self._feed(ids, feeding)])

    @torch.inference_mode()
    def batch_logits(self, batch: Sequence[Sequence[int]]) -> Tensor:
        """[prompts, tokens, vocab] of prompts of equal length in one forward."""
        logits: Tensor = self.model(input_ids=torch.tensor([list(ids) for ids in batch]), use_cache=False).logits
        return logits.float()

    @torch.inference_mode()
    def capture(self, ids: Sequence[int]) -> tuple[Tensor, Capture]:
        """A full forward with everything recorded."""
        recorder = ModuleRecorder(self.modules, dict(self.layers), len(ids))
        with recorder.attached() as capture:
            logits = self.logits(ids)
        return logits, capture

    @torch.inference_mode()
    def replay(self, ids: Sequence[int], capture: Capture, tell: Tell, feeding: Feeding = WHOLE) -> None:
        """The tokens fed as asked, but each layer gets the capture's input; `tell` hears of each module's outputs."""
        place = range(len(ids))
        handles = []

        def hook(name: str) -> Callable[..., None]:
            def listen(module: nn.Module, args: Any, output: Any) -> None:
                rows = [per_token(tensor, len(place)) for tensor in real_parts(tensors_of([output]))]
                tell(name, tuple(tensor for tensor in rows if tensor is not None), place.start)

            return listen

        def graft(value: Tensor) -> Callable[..., Any]:
            def replace(module: nn.Module, args: Any, kwargs: Any) -> Any:
                return with_first_tensor(args, kwargs, value[None, place.start : place.stop].to(self.dtype))

            return replace

        for name in capture.calls.keys() - capture.repeated:
            if name in self.modules:
                handles.append(self.modules[name].register_forward_hook(hook(name)))
        for name in self.layers:
            value = capture.calls[name].inputs[0]
            handles.append(self.modules[name].register_forward_pre_hook(graft(value), with_kwargs=True))
        try:
            with self._fresh_cache():
                for part in self._parts(ids, feeding):
                    place = part
                    self._step(ids, part, feeding)
        finally:
            for handle in handles:
                handle.remove()

    def continuation(self, ids: Sequence[int], num_tokens: int) -> Continuation:
        """Greedy tokens after a prompt; end-of-sequence ids do not stop it.

        One prefill, then one token at a time through the cache, with every position said.
        """
        question = ("continuation", tuple(ids), num_tokens)
        if question not in self.known:
            self.known[question] = self._continue(list(ids), num_tokens)
        known: Continuation = self.known[question]
        return known

    @torch.inference_mode()
    def continuation_by_full_forwards(self, ids: Sequence[int], num_tokens: int) -> Continuation:
        """The same with no cache: each token from a forward over all before it."""
        fed, rows = list(ids), []
        for _ in range(num_tokens):
            rows.append(self.logits(fed)[-1])
            fed.append(int(rows[-1].argmax()))
        return Continuation(tuple(fed[len(ids) :]), torch.stack(rows))

    @torch.inference_mode()
    def _continue(self, fed: list[int], num_tokens: int) -> Continuation:
        rows, start, done = [], len(fed), 0
        with self._fresh_cache():
            for _ in range(num_tokens):
                rows.append(self._step(fed, range(done, len(fed)), Feeding((1,)))[0, -1])
                done = len(fed)
                fed.append(int(rows[-1].argmax()))
        return Continuation(tuple(fed[start:]), torch.stack(rows))

    @torch.inference_mode()
    def cached(self, ids: Sequence[int]) -> Any:
        """The cache, of the model's own kind, after a prefill of these tokens; None where it gives none."""
        with self._fresh_cache():
            self._step(ids, range(len(ids)), Feeding((len(ids),)))
            return self._cache

    def _feed(self, ids: Sequence[int], feeding: Feeding) -> Iterator[tuple[range, Tensor]]:
        with self._fresh_cache():
            for part in self._parts(ids, feeding):
                yield part, self._step(ids, part, feeding)

    @staticmethod
    def _parts(ids: Sequence[int], feeding: Feeding) -> Iterator[range]:
        start = 0
        for length in feeding.parts or (len(ids),):
            yield range(start, start + length)
            start += length

    @contextmanager
    def _fresh_cache(self) -> Iterator[None]:
        self._cache = None
        try:
            yield
        finally:
            self._cache = None

    def _step(self, ids: Sequence[int], part: range, feeding: Feeding) -> Tensor:
        """[1, tokens of the part, vocab]. The model makes a cache of its own kind in the first step, if it can."""
        more: dict[str, Any] = {"input_ids": torch.tensor([list(ids[part.start : part.stop])])}
        more["use_cache"] = bool(feeding.parts)
        said = bool(feeding.parts) and feeding.positions
        if said:
            more["position_ids"] = torch.arange(part.start, part.stop)[None]
        if part.start:
            more[self._cache_argument] = _told(self._cache, part.start) if said else self._cache
        try:
            output = self.model(**more)
        except ValueError:
            if not said or part.start:
                raise
            output = self.model(**more, **self._new_cache())
        if feeding.parts:
            found = getattr(output, self._cache_argument, None)
            self._cache = more.get(self._cache_argument) if found is None else found
            if self._cache is None:
                output = self._with_kept_cache(more)
        else:
            self._cache = None
        logits: Tensor = output.logits.float()
        return logits

    def _new_cache(self) -> dict[str, Any]:
        """A cache of transformers' general kind, as the model's argument."""
        import transformers

        cache = transformers.DynamicCache(config=self.config.get_text_config())
        return {self._cache_argument: _told(cache, 0)}

    def _with_kept_cache(self, more: dict[str, Any]) -> Any:
        """The first step once more, of a model that gives its cache to nobody, with a cache that is kept here.

        Such a model also remembers in its modules (RecurrentGemma), and forgets in a forward without a cache.
        """
        self.model(**more | {"use_cache": False})
        given = self._new_cache()
        output = self.model(**more, **given)
        self._cache = given[self._cache_argument]
        return output


def _told(cache: Any, num_tokens: int) -> Any:
    """The cache, told how many tokens it holds where it refuses to count them."""
    if _refuses_to_count(cache):
        cache.get_seq_length = lambda *_, **__: num_tokens
        cache.get_mask_sizes = lambda query_length, *_, **__: (num_tokens + query_length, 0)
    return cache


def _refuses_to_count(cache: Any) -> bool:
    """transformers' cache counts its tokens by attention layers, and raises without any."""
    if "get_seq_length" in vars(cache):
        return True
    try:
        cache.get_seq_length()
    except ValueError:
        return True
    return False


def with_first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Tensor) -> Any:
    """A call's arguments with the first tensor, the residual stream, replaced."""
    if args:
        return (value, *args[1:]), kwargs
    first = next(key for key, item in kwargs.items() if isinstance(item, Tensor))
    return args, {**kwargs, first: value}
