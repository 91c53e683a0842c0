"""From logits to token ids. A row's result depends on that row alone; randomness is a hash of (seed, position)."""

from __future__ import annotations

import torch
from torch import Tensor

from rtp_kernel.ops.topk import top_k as stable_top_k

_MASK32 = 0xFFFFFFFF


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """One id for each row of logits [R, V] float32 -> [R] int64.

    temperature [R]: 0 is greedy (the lowest id among equals). top_k [R] int: below 1 is off. top_p [R]: 1 is off.
    min_p [R]: 0 is off. They apply in this order, as in transformers. seeds and positions [R] int64: the draw is a
    function of both.
    """
    greedy = temperature <= 0
    ids = logits.argmax(dim=-1)
    if bool(greedy.all()):
        return ids
    rows = torch.nonzero(~greedy).squeeze(-1)
    scaled = logits[rows] / temperature[rows, None]
    scaled = restrict(scaled, top_k[rows], top_p[rows], min_p[rows])
    ids[rows] = _draw(torch.softmax(scaled, dim=-1), uniform(seeds[rows], positions[rows]))
    return ids


def restrict(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """logits [R, V] with -inf for what top-k, top-p and min-p (each [R]) exclude; the best id of a row always stays."""
    num = logits.shape[-1]
    limited = (top_k > 0) & (top_k < num)
    if bool(limited.any()) or bool((top_p < 1).any()):
        ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        size = torch.where(limited, top_k, num)[:, None]
        out = torch.arange(num, device=logits.device) >= size  # [R, V], in sorted order
        probs = torch.softmax(ordered.masked_fill(out, float("-inf")), dim=-1)
        before = probs.cumsum(dim=-1) - probs
        out |= (before >= top_p[:, None]) & (top_p < 1)[:, None]
        out[:, 0] = False
        logits = logits.masked_fill(out.scatter(-1, order, out), float("-inf"))
    if bool((min_p > 0).any()):
        probs = torch.softmax(logits, dim=-1)
        logits = logits.masked_fill(probs < min_p[:, None] * probs.amax(-1, keepdim=True), float("-inf"))
    return logits


def _draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The id at which the cumulative probability passes the uniform number; ids of probability 0 are never drawn."""
    cumulative = probs.double().cumsum(dim=-1)
    aim = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, aim, right=True).squeeze(-1).clamp_(max=probs.shape[-1] - 1)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """[R] float64 in [0, 1): a counter hash of seeds and positions [R] int64."""
    state = _mix(_mix(_mix(seeds & _MASK32) ^ ((seeds >> 32) & _MASK32)) ^ (positions & _MASK32))
    second = _mix(state ^ 0x9E3779B9)
    return (state * 2**21 + (second >> 11)).double() / 2.0**53


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers held in int64 ("lowbias32", C. Wellons)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def penalize(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """logits [R, V] after penalties, each [R].

    repetition (1 is off; transformers): divides positive and multiplies negative logits of ids in the prompt
    (prompt_mask [R, V] bool) or the output (output_counts [R, V]). presence and frequency (0 is off; OpenAI):
    subtracted once, and once per occurrence, for ids in the output.
    """
    seen = output_counts > 0
    factor = repetition[:, None]
    repeated = torch.where(logits < 0, logits * factor, logits / factor)
    logits = torch.where(prompt_mask | seen, repeated, logits)
    return logits - presence[:, None] * seen - frequency[:, None] * output_counts


def logprobs(logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of logits [R, V]: of ids [R] -> [R]; of the k best -> [R, k] and their ids (ties: lower id)."""
    logs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logs.gather(-1, ids[:, None]).squeeze(-1)
    return chosen, *stable_top_k(logs, k)
