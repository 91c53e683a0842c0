"""Plugins: found, loaded each alone, checked, and merged into what the runtime can serve. Imports no torch."""

from __future__ import annotations

from rtp_runtime.model.registry import ModelDefinition, ModelRegistry
from rtp_runtime.plugins.catalogue import LoadedPlugin, Plugins
from rtp_runtime.plugins.failures import PluginFailure
from rtp_runtime.plugins.loading import load_plugins
from rtp_runtime.plugins.registries import CommandRegistry, ExtensionRegistry, OpRegistrations

__all__ = [
    "CommandRegistry",
    "ExtensionRegistry",
    "LoadedPlugin",
    "ModelDefinition",
    "ModelRegistry",
    "OpRegistrations",
    "PluginFailure",
    "Plugins",
    "load_plugins",
]
