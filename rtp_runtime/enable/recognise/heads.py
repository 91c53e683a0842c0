"""Which config keys say how many heads an attention block has and how wide they are."""

from __future__ import annotations

from torch import nn

from rtp_runtime.enable.findings import UnrecognisedError
from rtp_runtime.enable.match import express
from rtp_runtime.enable.recognise.view import View
from rtp_runtime.enable.recording import AttentionCall
from rtp_runtime.enable.sizes import Sizes


def find_sizes(view: View, module: nn.Module, call: AttentionCall) -> Sizes:
    """The sizes by which this attention block was seen to run.

    Raises:
        UnrecognisedError: a number that follows from no key.
    """
    config, keys = view.config, view.keys_of(module)
    usual = Sizes.of(config)
    heads, dim = config.num_attention_heads, call.key.shape[-1]
    known = getattr(config, "head_dim", None) or config.hidden_size // heads
    head_dim = usual.head_dim if known == dim else _size(view, module, dim, keys, "its head dim")
    seen_heads, seen_kv = call.query.shape[1], call.key.shape[1]
    heads_code = usual.heads if heads == seen_heads else _size(view, module, seen_heads, keys, "its number of heads")
    kv = getattr(config, "num_key_value_heads", None) or heads
    if kv == seen_kv:
        return Sizes(head_dim, usual.kv_heads, heads_code)
    others = [key for key in vars(config) if "kv_heads" in key or "key_value" in key]
    code = next((f"config.{key}" for key in others if getattr(config, key) == seen_kv), None)
    if code is None and seen_kv == seen_heads:
        return Sizes(head_dim, heads_code, heads_code)
    if code is None and seen_kv == 1:
        return Sizes(head_dim, "1", heads_code)
    return Sizes(head_dim, code or _size(view, module, seen_kv, keys, "its number of key heads"), heads_code)


def _size(view: View, module: nn.Module, value: int, keys: list[str], what: str) -> str:
    found = express(value, view.config, keys)
    if found is None or "/" in found.code or "*" in found.code:
        raise UnrecognisedError(
            type(module).__name__, f"{what} is {value}, which no config key that it reads says.", "that rule"
        )
    return found.code
