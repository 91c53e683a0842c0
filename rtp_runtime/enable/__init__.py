"""Enabling a checkpoint that no plugin serves: assess it against the reference, scaffold a plugin, prove it.

`assess` imports torch and transformers and is imported from its module; what stands here does not.
"""

from rtp_runtime.enable.names import PluginNames, plugin_names
from rtp_runtime.enable.source import find_config

__all__ = ["PluginNames", "find_config", "plugin_names"]
