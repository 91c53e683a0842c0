"""Small sizes of state spaces, convolutions and linear attention, and of what other sizes of a config follow from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATE = 12
RANK = 6
CHUNK = 16
HEADS = 8
GROUPS = 2
KEY_DIM, VALUE_DIM = 8, 24

_STATE = ("state_size", "ssm_state_size", "mamba_d_state")
_RANK = ("time_step_rank", "mamba_dt_rank")
_CHUNK = ("chunk_size", "mamba_chunk_size")
_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
_HEAD_DIM = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
_EXPAND = ("expand", "mamba_expand")
_LINEAR_DIMS = ("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim")


def state_space_sizes(values: Mapping[str, Any], hidden: int) -> dict[str, int]:
    """Key -> small size, of the keys that a config's `values` has, for a model of width `hidden`.

    What the original sizes have to do with each other (an inner width of `expand` times the hidden size, a width that
    is the hidden size by another name) holds for the small ones too.
    """
    found = {**_state_space(values, hidden), **_linear_attention(values)}
    width = values.get("hidden_size")
    for key, factor in (("lru_width", 1), ("attention_hidden_size", 2), ("attention_hidden_size", 1)):
        if width and values.get(key) == factor * width:
            found[key] = factor * hidden
    return found


def _state_space(values: Mapping[str, Any], hidden: int) -> dict[str, int]:
    if not any(values.get(key) for key in _STATE):
        return {}
    found = {key: STATE for key in _STATE} | {key: RANK for key in _RANK} | {key: CHUNK for key in _CHUNK}
    expand = next((values[key] for key in _EXPAND if values.get(key)), 2)
    inner, before = int(expand * hidden), int(expand * values["hidden_size"])
    heads = next((values[key] for key in _HEADS if values.get(key)), 0)
    # Two groups where the original has one as well: a norm per group and a norm of all are then told apart.
    found |= {key: 1 if heads % GROUPS else GROUPS for key in _GROUPS if values.get(key)}
    if heads:
        small = HEADS if heads >= HEADS else heads
        dims = _HEAD_DIM if values.get("num_attention_heads") else (*_HEAD_DIM, "head_dim")
        found |= {key: small for key in _HEADS} | {key: inner // small for key in dims}
        found["mamba_d_ssm"] = inner
    if values.get("intermediate_size") == before:
        found["intermediate_size"] = inner
    return {key: size for key, size in found.items() if isinstance(values.get(key), int)}


def _linear_attention(values: Mapping[str, Any]) -> dict[str, int]:
    found = {}
    keys, shared = values.get("linear_num_key_heads"), values.get("linear_num_value_heads")
    if keys and shared:
        found = {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * min(2, shared // keys)}
    elif values.get("linear_num_heads"):
        found = {"linear_num_heads": 4}
    dims = {values[key] for key in _LINEAR_DIMS if values.get(key)}
    small = {"linear_head_dim": 16, "linear_key_head_dim": KEY_DIM, "linear_value_head_dim": VALUE_DIM}
    if len(dims) == 1:
        small = dict.fromkeys(_LINEAR_DIMS, 16)
    return found | {key: size for key, size in small.items() if values.get(key)}
