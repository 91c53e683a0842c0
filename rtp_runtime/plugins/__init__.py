"""Plugins: found, loaded each alone, checked, and merged into what the runtime can serve. Imports no torch."""

from __future__ import annotations

from rtp_runtime.plugins.catalogue import LoadedPlugin, Plugins
from rtp_runtime.plugins.failures import PluginFailure
from rtp_runtime.plugins.loading import load_plugins

__all__ = ["LoadedPlugin", "PluginFailure", "Plugins", "load_plugins"]
