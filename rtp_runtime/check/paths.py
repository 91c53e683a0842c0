"""The reference's other ways to the same numbers: other attention, grouped experts, a batch, and its cache.

Their disagreement with one full forward is the noise that no verdict may go below, or a fault of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from rtp_runtime.check.capture import Capture
from rtp_runtime.check.reference import WHOLE, Feeding, Reference, Tell

BATCHED_TOKENS = 64
SEVERAL = 5
"""Chunks: every way to cut a prompt rounds otherwise, and one alone may happen to round alike."""
SHORT = 96
"""A prompt of at most this length is also run with each of its tokens alone where layers are recurrent."""
SINGLE_STEPS = 4
"""Tokens that are fed one at a time after a prefill."""
BATCH, TWO_CHUNKS, ONE_BY_ONE = "batch of two", "cache, in two chunks", "cache, one token at a time"


@dataclass(frozen=True, slots=True)
class OtherPath:
    """One other way. `independent`: it goes through the cache, and shares least with a full forward."""

    name: str
    feeding: Feeding = WHOLE
    setting: Callable[[], AbstractContextManager[None]] = nullcontext
    independent: bool = False
    measures_modules: bool = True
    """Whether its modules are compared even where its logits agree."""

    def logits(self, reference: Reference, ids: Sequence[int]) -> Tensor:
        """[tokens, vocab] of the first tokens, float32."""
        with self.setting():
            if self.name == BATCH:
                # A row of a batch does not say more at greater length, and costs twice.
                few = list(ids[:BATCHED_TOKENS])
                return reference.batch_logits([few, few[::-1]])[0]
            return reference.logits(ids, self.feeding)

    def replay(self, reference: Reference, ids: Sequence[int], capture: Capture, tell: Tell) -> None:
        """Each module's outputs, given the same layer inputs. A batch has none: its rows are not the capture's."""
        if self.name != BATCH:
            with self.setting():
                reference.replay(ids, capture, tell, self.feeding)


class Effort(Enum):
    """How much of the reference is compared with itself on a prompt."""

    LOGITS = 0
    """The logits through its cache: a norm of small values lets some token's drift, in any prompt."""
    MODULES = 1
    """All paths, and module by module."""
    ALL = 2
    """Also the cache without saying where the tokens stand."""


def other_paths(reference: Reference, num_tokens: int, effort: Effort, recurrent: bool) -> Iterator[OtherPath]:
    """What this model offers. `recurrent`: some layers compute otherwise over a prompt than token by token."""
    modules = effort is not Effort.LOGITS
    if reference.is_large:
        yield from _few_paths(reference, num_tokens, recurrent)
        return
    if modules:
        yield OtherPath(BATCH)
        for name, setting in _settings(reference.model):
            yield OtherPath(name, setting=setting)
    if num_tokens < 2 or not reference.keeps_cache:
        return
    middle, start = num_tokens // 2, max(1, num_tokens - SINGLE_STEPS)
    if reference.is_small and num_tokens > SEVERAL:
        yield _several_chunks(num_tokens)
    if recurrent and reference.is_small and effort is not Effort.MODULES and num_tokens <= SHORT:
        yield OtherPath(
            "cache, every token alone", Feeding((1,) * num_tokens), independent=True, measures_modules=False
        )
    plans = {
        TWO_CHUNKS: (middle, num_tokens - middle),
        ONE_BY_ONE: (start, *[1] * (num_tokens - start)),
    }
    for name, parts in plans.items():
        yield OtherPath(name, Feeding(parts), independent=True, measures_modules=modules)
    for name, parts in plans.items() if effort is Effort.ALL else ():
        yield OtherPath(
            f"{name}, positions left to the model", Feeding(parts, False), independent=True, measures_modules=False
        )


def _few_paths(reference: Reference, num_tokens: int, recurrent: bool) -> Iterator[OtherPath]:
    """Of a large model: all other implementations at once, and its cache.

    Its continuations go through the cache token by token already, and are compared with a full forward.
    """
    settings = dict(_settings(reference.model))

    @contextmanager
    def every() -> Iterator[None]:
        with ExitStack() as stack:
            for setting in settings.values():
                stack.enter_context(setting())
            yield

    if settings:
        yield OtherPath(" and ".join(settings), setting=every)
    if num_tokens > 1 and reference.keeps_cache:
        halves = (num_tokens // 2, num_tokens - num_tokens // 2)
        yield OtherPath(TWO_CHUNKS, Feeding(halves), independent=True, measures_modules=False)
        if recurrent and num_tokens > SEVERAL:
            yield _several_chunks(num_tokens)


def _several_chunks(num_tokens: int) -> OtherPath:
    size = -(-num_tokens // SEVERAL)
    chunks = [min(size, num_tokens - place) for place in range(0, num_tokens, size)]
    return OtherPath("cache, in several chunks", Feeding(tuple(chunks)), independent=True, measures_modules=False)


def _settings(model: Any) -> Iterator[tuple[str, Callable[[], AbstractContextManager[None]]]]:
    """Contexts in which the reference computes the same with other implementations."""
    if _accepts(model.set_attn_implementation, "sdpa", "eager"):
        yield "sdpa attention", lambda: _set(model.set_attn_implementation, "sdpa", "eager")
    experts = getattr(model, "set_experts_implementation", None)
    can_set = getattr(type(model), "_can_set_experts_implementation", bool)
    if experts is not None and can_set() and _accepts(experts, "grouped_mm", "eager"):
        yield "grouped experts", lambda: _set(experts, "grouped_mm", "eager")


def _accepts(setter: Callable[[str], Any], value: str, default: str) -> bool:
    try:
        with _set(setter, value, default):
            return True
    except (ValueError, ImportError, KeyError):
        return False


@contextmanager
def _set(setter: Callable[[str], Any], value: str, default: str) -> Iterator[None]:
    try:
        setter(value)
        yield
    finally:
        setter(default)
