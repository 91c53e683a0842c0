"""The nn.Modules that model files are made of. Unbound they compute with the plain references."""

from rtp_kernel.components.attention import Attention
from rtp_kernel.components.base import Binding, Component, bind_components, components, parameter, prepare_components
from rtp_kernel.components.embedding import Embedding
from rtp_kernel.components.linear import Linear, MergedLinear
from rtp_kernel.components.mlp import Gate, GatedMLP
from rtp_kernel.components.moe import Experts, TopKRouter
from rtp_kernel.components.norm import LayerNorm, RMSNorm
from rtp_kernel.components.rotary import RopeParameters, Rotary, RotaryEmbedding

__all__ = [
    "Attention",
    "Binding",
    "Component",
    "Embedding",
    "Experts",
    "Gate",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "MergedLinear",
    "RMSNorm",
    "RopeParameters",
    "Rotary",
    "RotaryEmbedding",
    "TopKRouter",
    "bind_components",
    "components",
    "parameter",
    "prepare_components",
]
