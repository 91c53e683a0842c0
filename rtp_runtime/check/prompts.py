"""The token ids that a check runs: texts where there is a tokenizer, drawn ids otherwise, long enough to show faults.

A window shows only in prompts longer than itself, a wrong base of the rotary embedding only at large positions, an
expert only when a token is routed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rtp_runtime.errors import UsageError

PROMPT_LENGTHS = (24, 61, 320)
"""Tokens of the drawn prompts, where the model has room; the last is the length of the longest prompt in any case."""
MAX_WINDOW_PROMPT = 4096
"""A window is crossed only if a prompt of this length crosses it twice: eager attention is quadratic."""

TEXTS = (
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return",
    "In 1969, three people flew to the Moon; two of them walked on it. Их имена знает каждый. 猫は静かに座っていた。",
)
LONG_TEXT = (
    "A lighthouse keeper wrote down everything that passed: {n} ships with red sails, a storm from the north-west, the "
    "price of oil ({n}.{n} a barrel), and once, on the {n}th of May, a whale. "
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: what it is for, and its token ids."""

    name: str
    ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What the prompts must respect, and what they must reach."""

    vocab_size: int
    max_tokens: int
    """Most tokens of a prompt, its continuation left room for."""
    windows: tuple[int, ...] = ()
    """Windows of sliding layers, to be crossed twice."""
    lengths: tuple[int, ...] = PROMPT_LENGTHS

    @property
    def long(self) -> int:
        """Length of the longest prompt."""
        crossing = [2 * window + 5 for window in self.windows if 2 * window + 5 <= MAX_WINDOW_PROMPT]
        return min(self.max_tokens, max([self.lengths[-1], *crossing]))


def make_prompts(
    limits: PromptLimits, seed: int, encode: Callable[[str], Sequence[int]] | None, texts: Sequence[str] = ()
) -> list[Prompt]:
    """Prompts of several lengths, the longest last. `encode` is the tokenizer's, `texts` the user's own prompts."""
    if encode is None and texts:
        raise UsageError(
            f"the prompt {texts[0]!r} cannot be read: this checkpoint has no tokenizer; leave --prompt out"
        )
    if encode is None:
        lengths = (*limits.lengths[:-1], limits.long)
        return [draw_prompt(limits, min(n, limits.max_tokens), seed + i) for i, n in enumerate(lengths)]
    named = [(f"text {place + 1}", text) for place, text in enumerate(TEXTS)]
    named += [(f"your prompt {place + 1}", text) for place, text in enumerate(texts)]
    prompts = [Prompt(name, _cut(encode(text), limits.max_tokens)) for name, text in named]
    long_text = "".join(LONG_TEXT.format(n=n) for n in range(2, 2 + limits.long // 20))
    ids = _cut(encode(long_text), limits.long)
    prompts.append(Prompt(f"long text of {len(ids)} tokens", ids))
    if len(ids) < limits.long:
        prompts.append(draw_prompt(limits, limits.long, seed))
    return [prompt for prompt in prompts if prompt.ids]


def draw_prompt(limits: PromptLimits, num_tokens: int, seed: int) -> Prompt:
    """`num_tokens` token ids drawn evenly from the vocabulary."""
    import torch

    generator = torch.Generator().manual_seed(1000 + seed)
    ids = torch.randint(0, limits.vocab_size, (num_tokens,), generator=generator).tolist()
    return Prompt(f"{num_tokens} drawn ids, seed {seed}", tuple(ids))


def _cut(ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    return tuple(ids)[:num_tokens]
