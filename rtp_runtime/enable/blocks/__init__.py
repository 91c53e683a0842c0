"""The blocks that decoder layers are made of, each as facts from which its code, weights and states follow.

A new kind of block is a file here with a frozen dataclass that derives from `Block` (base.py says what each method
gives), and a recogniser `(view, name) -> Block` in `enable/recognise/`, which is entered in the list of
`recognise/blocks.py`. Nothing else changes:

* Blocks of two layers that are equal are one block. Those that differ in fields marked `BY_LAYER` alone are one class,
  whose field becomes a `ByLayer` of (condition, value). All others are told apart where layers are constructed, or,
  when their calls take different arguments, by a layer class of their own. Fields must therefore hold code over
  `config`, never numbers that were seen, and nothing that names a layer.
* `takes` names what the call is given after the hidden rows: "position_embeddings" (cos, sin), "batch", and each state
  by the name that it has in `states()`. A class that `source()` writes has these as arguments of `forward`, in order.
* `declare(place)` adds descriptors: `place.weight("q_proj.weight", axis, "hidden")` for a tensor under its own name,
  `place.made(leaf, source)` for one that is made of others; `place.axis`, `place.local` and `place.tensor` make local
  variables, whose final names they return. `hidden` and `vocabulary` are there; `place.child(name)` is a module inside.
"""

from rtp_runtime.enable.blocks.attention import Attention
from rtp_runtime.enable.blocks.base import BY_LAYER, Block, ByLayer, code_of, values_of
from rtp_runtime.enable.blocks.mlp import Mlp
from rtp_runtime.enable.blocks.moe import MoE, RoutedExperts, Router, Shared
from rtp_runtime.enable.blocks.norm import Norm
from rtp_runtime.enable.blocks.projection import Projection

__all__ = [
    "BY_LAYER",
    "Attention",
    "Block",
    "ByLayer",
    "Mlp",
    "MoE",
    "Norm",
    "Projection",
    "RoutedExperts",
    "Router",
    "Shared",
    "code_of",
    "values_of",
]
