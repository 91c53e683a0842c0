"""The toy model written down again in plain Python integers: from a whole token list, with no state and no batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from toy.numbers import (
    BUFFER_INITIAL,
    PRIME,
    SCORES,
    STATE_INITIAL,
    TOP_K,
    VOCAB,
    WIDTH,
    WINDOW,
    ToyConfig,
    coefficients,
)

Row = list[int]


def logits(tokens: Sequence[int], config: ToyConfig) -> list[Row]:
    """[tokens, VOCAB]"""
    stream = [
        [
            (c * (token + 1) + d * (place + 1)) % PRIME
            for c, d in zip(coefficients(9, 0), coefficients(9, 1), strict=True)
        ]
        for place, token in enumerate(tokens)
    ]
    layers = [_paged, _window, *(_compressed(ratio) for ratio in config.ratios), _recurrent, _selected]
    for layer, attend in enumerate(layers):
        stream = _add(stream, attend(stream, layer), layer)
    return [[_logit(row, word) for word in range(VOCAB)] for row in stream]


def generate(prompt: Sequence[int], count: int, config: ToyConfig) -> list[int]:
    """Greedy continuation; the lowest id wins a tie."""
    tokens = list(prompt)
    for _ in range(count):
        last = logits(tokens, config)[-1]
        tokens.append(last.index(max(last)))
    return tokens[len(prompt) :]


def _logit(row: Row, word: int) -> int:
    return (row[0] * (word + 1) + row[1] * (word * word + 3) + row[2] * (word + 2) ** 3) % PRIME


def _dot(row: Row, layer: int, what: int) -> int:
    return sum(value * factor for value, factor in zip(row, coefficients(layer, what), strict=True)) % PRIME


def _add(stream: list[Row], out: list[int], layer: int) -> list[Row]:
    """Residual: each token's output is spread over the stream, and squared so that layers do not commute."""
    spread = coefficients(layer, 7)
    return [
        [(row[place] + out_t * spread[place] + out_t * out_t % PRIME) % PRIME for place in range(WIDTH)]
        for row, out_t in zip(stream, out, strict=True)
    ]


def _paged(stream: list[Row], layer: int) -> list[int]:
    out = []
    for t, row in enumerate(stream):
        query = _dot(row, layer, 0)
        seen = [(_dot(stream[s], layer, 1), _dot(stream[s], layer, 2), s) for s in range(t + 1)]
        out.append(sum(query * key + (s + 1) * value for key, value, s in seen) % PRIME)
    return out


def _window(stream: list[Row], layer: int) -> list[int]:
    out = []
    for t, row in enumerate(stream):
        query = _dot(row, layer, 0)
        seen = [(_dot(stream[s], layer, 1), t - s + 1) for s in range(max(0, t - WINDOW + 1), t + 1)]
        out.append(sum((query + age) * key % PRIME for key, age in seen) % PRIME)
    return out


def _compressed(ratio: int) -> Callable[[list[Row], int], list[int]]:
    def attend(stream: list[Row], layer: int) -> list[int]:
        values = [_dot(row, layer, 1) for row in stream]
        entries = []
        for first in range(0, len(values) - ratio + 1, ratio):
            before = values[first - 1] if first else BUFFER_INITIAL
            total = sum((j + 1) * values[first + j] for j in range(ratio)) + 11 * before
            entries.append(total * total % PRIME)
        out = []
        for t, row in enumerate(stream):
            query = _dot(row, layer, 0)
            out.append(sum((query + w) * entry for w, entry in enumerate(entries[: (t + 1) // ratio])) % PRIME)
        return out

    return attend


def _recurrent(stream: list[Row], layer: int) -> list[int]:
    state = [[STATE_INITIAL, STATE_INITIAL], [STATE_INITIAL, STATE_INITIAL]]
    out = []
    for row in stream:
        a, b, q = (_dot(row, layer, what) for what in range(3))
        (s00, s01), (s10, s11) = state
        state = [
            [(s00 * a + s01) % PRIME, (s00 + s01 * b) % PRIME],
            [(s10 * a + s11) % PRIME, (s10 * b + s11 + 1) % PRIME],
        ]
        out.append((state[0][0] * q + state[0][1] + state[1][0] + state[1][1] * q) % PRIME)
    return out


def _selected(stream: list[Row], layer: int) -> list[int]:
    out = []
    for t, row in enumerate(stream):
        query, wanted = _dot(row, layer, 0), _dot(row, layer, 3)
        ranked = sorted(range(t + 1), key=lambda s: (-(wanted * _dot(stream[s], layer, 4) % PRIME % SCORES), s))
        out.append(sum((query + s + 1) * _dot(stream[s], layer, 1) for s in ranked[:TOP_K]) % PRIME)
    return out
