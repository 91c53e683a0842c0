"""What an engine can serve: its state sized for a model, its longest request, and the checks a request must pass."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rtp_runtime.engine.config import EngineConfig
from rtp_runtime.engine.limits import ModelLimits
from rtp_runtime.engine.sampling_params import SamplingParams
from rtp_runtime.errors import RequestError, UsageError
from rtp_runtime.state import StateDescriptors, StateManager
from rtp_runtime.state.grouping import group_states
from rtp_runtime.state.keys import namespace

if TYPE_CHECKING:
    from rtp_runtime.model import LoadedModel


def resolve_model_len(config: EngineConfig, limits: ModelLimits, capacity: int) -> int:
    """Tokens of the longest request.

    Raises:
        UsageError: more was asked than the model's context or the state allows.
    """
    wanted = config.max_model_len
    if wanted is None:
        return capacity if limits.context is None else min(limits.context, capacity)
    if limits.context is not None and wanted > limits.context:
        raise UsageError(f"max_model_len={wanted} is beyond the model's context of {limits.context} tokens: lower it")
    if wanted > capacity:
        raise UsageError(
            f"max_model_len={wanted} tokens do not fit: the state has room for a request of {capacity}; "
            "lower it, or raise num_blocks or memory"
        )
    return wanted


def token_array(token_ids: Any) -> NDArray[np.int64]:
    """Token ids as an array of their own.

    Raises:
        RequestError: something that is no list of integers.
    """
    if hasattr(token_ids, "tolist"):
        token_ids = token_ids.tolist()
    if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
        raise RequestError(f"{token_ids!r} is a {type(token_ids).__name__}: give a list of token ids")
    for place, value in enumerate(token_ids):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise RequestError(f"token {place} of the prompt is {value!r}, a {type(value).__name__}: give integers")
    try:
        return np.array(token_ids, dtype=np.int64)
    except OverflowError as error:
        raise RequestError(f"a token id of the prompt is beyond 64 bits: {error}") from error


def make_state(loaded: LoadedModel, config: EngineConfig, limits: ModelLimits, max_drafts: int = 0) -> StateManager:
    """State for the engine's limits, as large as the config says, or else as the free memory allows.

    Raises:
        StateError: state that cannot be sized.
    """
    num_blocks, memory = config.num_blocks, config.memory
    if num_blocks is not None and memory is not None:
        raise UsageError(f"num_blocks={num_blocks} and memory={memory} both size the state: give one of them")
    num_snapshots = 0
    if num_blocks is None and memory is None:
        # Of each request the state at the end of its prompt, and the latest, which its next turn begins with.
        num_snapshots = 2 * config.max_num_seqs if config.prefix_caching else 0
        num_blocks, memory = _default_size(loaded, config, limits, max_drafts)
    return StateManager(
        chosen_states(loaded, config),
        cache_dtype=loaded.dtype,
        device=loaded.device,
        block_size=config.block_size,
        num_blocks=num_blocks,
        memory=memory,
        max_requests=config.max_num_seqs,
        max_drafts=max_drafts,
        max_step_tokens=min(config.max_num_batched_tokens, config.max_chunk_tokens or config.max_num_batched_tokens),
        depth=config.depth,
        num_snapshots=num_snapshots,
        prefixes=config.prefix_caching,
        prefix_memory=config.prefix_cache_memory,
    )


def chosen_states(loaded: LoadedModel, config: EngineConfig) -> StateDescriptors:
    """The model's own states, or those of the policy that the config names.

    Raises:
        UsageError: no plugin has registered the name for this model.
    """
    name = config.state_policy
    if name is None:
        return loaded.states
    if name not in loaded.state_policies:
        known = ", ".join(map(repr, loaded.state_policies)) or "none"
        raise UsageError(f"state_policy={name!r} is not registered for this model; registered are: {known}")
    return loaded.state_policies[name]


def prefix_namespace(loaded: LoadedModel, config: EngineConfig, state: StateManager) -> bytes:
    """What keys of this engine start from: everything besides tokens and salt that decides the state they name."""
    return namespace(
        loaded.fingerprint,
        str(loaded.dtype),
        config.state_policy,
        config.deterministic,
        str([(spec.kind, spec.block_size, spec.states) for spec in state.groups]),
    )


def _default_size(
    loaded: LoadedModel, config: EngineConfig, limits: ModelLimits, max_drafts: int
) -> tuple[int | None, int | None]:
    """(blocks, bytes), one of them None: enough for all requests at full length, within a third of the free memory."""
    groups = group_states(
        chosen_states(loaded, config),
        cache_dtype=str(loaded.dtype).removeprefix("torch."),
        block_size=config.block_size,
    )
    sizes = [group.block_size for group in groups if not group.is_slot]
    budget = free_memory(str(loaded.device)) // 3
    length = config.max_model_len or limits.context
    if length is None or not sizes:
        return None, budget
    num_blocks = config.max_num_seqs * -(-length // min(sizes))
    num_slots = 1 + max_drafts + config.prefix_caching
    per_request = sum(
        group.block_bytes * (num_slots if group.is_slot else -(-length // group.block_size)) for group in groups
    )
    return (num_blocks, None) if config.max_num_seqs * per_request <= budget else (None, budget)


def free_memory(device: str) -> int:
    """Bytes that can be taken on the device now."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class Admission:
    """The checks on a request; what passes them can always be served to its end."""

    def __init__(self, max_model_len: int, limits: ModelLimits, *, has_text: bool) -> None:
        self._max_model_len = max_model_len
        self._limits = limits
        self._has_text = has_text

    def check_prompt(self, prompt_ids: Any, *, return_logits: bool) -> NDArray[np.int64]:
        """The prompt as an array; a prompt whose logits are wanted may fill the whole context.

        Raises:
            RequestError: an empty or too long prompt, or an id outside the vocabulary.
        """
        ids = token_array(prompt_ids)
        vocab_size = self._limits.vocab_size
        if not len(ids):
            raise RequestError("the prompt is empty: give at least one token")
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if len(wrong):
            raise RequestError(
                f"token id {ids[wrong[0]]} at position {wrong[0]} is outside the vocabulary: "
                f"ids go from 0 to {vocab_size - 1}"
            )
        longest = self._max_model_len - (0 if return_logits else 1)
        if len(ids) > longest:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but the longest request is {self._max_model_len} tokens"
                f"{'' if return_logits else ', one of them new'}: shorten it to {longest}{self._remedy()}"
            )
        return ids

    def check_params(self, params: SamplingParams) -> None:
        """
        Raises:
            RequestError: parameters that this model cannot honour.
        """
        vocab_size = self._limits.vocab_size
        if params.stop and not self._has_text:
            raise RequestError(
                f"stop={list(params.stop)!r} needs a tokenizer, which this model lacks: use stop_token_ids"
            )
        for id_ in params.stop_token_ids:
            if id_ >= vocab_size:
                raise RequestError(
                    f"stop_token_ids has {id_}, outside the vocabulary: ids go from 0 to {vocab_size - 1}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > vocab_size:
                raise RequestError(f"{name}={count} is more than the vocabulary has: give at most {vocab_size}")

    def _remedy(self) -> str:
        context = self._limits.context
        if context is not None and self._max_model_len >= context:
            return f" (the model's context is {context})"
        return ", or raise max_model_len, num_blocks or memory"
