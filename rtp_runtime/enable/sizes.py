"""How a config names the sizes of its heads, and how generated code calls them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """How this config names its head counts and head dim."""

    head_dim: str
    kv_heads: str
    heads: str = "config.num_attention_heads"

    @property
    def name(self) -> str:
        """What a function calls the head dim: the config's key, or a local variable."""
        return "config.head_dim" if self.head_dim == "config.head_dim" else "head_dim"

    @property
    def local(self) -> list[str]:
        """The line that makes that variable, where there is one."""
        return [f"head_dim = {self.head_dim}"] if self.name == "head_dim" else []

    @classmethod
    def of(cls, config: Any) -> Sizes:
        """From the full config: a key that it leaves empty is computed as the reference does."""
        own_dim = getattr(config, "head_dim", None) is not None
        own_kv = getattr(config, "num_key_value_heads", None) is not None
        return cls(
            "config.head_dim" if own_dim else "config.hidden_size // config.num_attention_heads",
            "config.num_key_value_heads" if own_kv else "config.num_attention_heads",
        )
