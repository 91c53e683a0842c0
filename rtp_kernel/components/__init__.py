"""The nn.Modules that model files are made of. Unbound they compute with the plain references."""

from rtp_kernel.components.attention import Attention
from rtp_kernel.components.base import Binding, Component, bind_components, components, parameter, prepare_components
from rtp_kernel.components.block_means import BlockMeans
from rtp_kernel.components.block_selector import BlockSelector
from rtp_kernel.components.compressor import CompressedAttention, WindowPool
from rtp_kernel.components.embedding import Embedding, SinusoidalEmbedding
from rtp_kernel.components.hyper_connection import HyperConnection, HyperHead
from rtp_kernel.components.latent_attention import LatentAttention, LatentUp
from rtp_kernel.components.lightning_attention import LightningAttention
from rtp_kernel.components.linear import GroupedLinear, Linear, MergedLinear
from rtp_kernel.components.linear_attention import CausalConv, DeltaGates, GatedDeltaRule, GatedRMSNorm
from rtp_kernel.components.linear_recurrence import LinearRecurrence
from rtp_kernel.components.mlp import XIELU, Activation, Gate, GatedMLP
from rtp_kernel.components.moe import Experts, HashRouter, TopKRouter
from rtp_kernel.components.norm import LayerNorm, RMSNorm
from rtp_kernel.components.pooled_indexer import PooledIndexer
from rtp_kernel.components.rotary import RopeParameters, Rotary, RotaryEmbedding
from rtp_kernel.components.state_space import SelectiveScan, StateSpaceScan
from rtp_kernel.components.token_context import PreviousTokens
from rtp_kernel.components.token_indexer import EntryIndexer, TokenIndexer

__all__ = [
    "XIELU",
    "Activation",
    "Attention",
    "Binding",
    "BlockMeans",
    "BlockSelector",
    "CausalConv",
    "Component",
    "CompressedAttention",
    "DeltaGates",
    "Embedding",
    "EntryIndexer",
    "Experts",
    "Gate",
    "GatedDeltaRule",
    "GatedMLP",
    "GatedRMSNorm",
    "GroupedLinear",
    "HashRouter",
    "HyperConnection",
    "HyperHead",
    "LatentAttention",
    "LatentUp",
    "LayerNorm",
    "LightningAttention",
    "Linear",
    "LinearRecurrence",
    "MergedLinear",
    "PooledIndexer",
    "PreviousTokens",
    "RMSNorm",
    "RopeParameters",
    "Rotary",
    "RotaryEmbedding",
    "SelectiveScan",
    "SinusoidalEmbedding",
    "StateSpaceScan",
    "TokenIndexer",
    "TopKRouter",
    "WindowPool",
    "bind_components",
    "components",
    "parameter",
    "prepare_components",
]
