"""The hooks that a plugin may implement, and the marker it puts on them.

A hook takes a registry and returns nothing. Hooks run once, at start-up, and must import neither torch nor
transformers: registries take `"package.module:name"` strings that are imported when they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from rtp_runtime.plugins import CommandRegistry, ExtensionRegistry, ModelRegistry, OpRegistrations

PROJECT = "rtp"
ENTRY_POINT_GROUP = "rtp.plugins"
API_VERSION = "0.1"
"""Version of every public name of rtp_kernel and rtp_runtime. While it is 0.x, a minor step may break it."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def rtp_register_models(models: ModelRegistry) -> None:
    """Add models: `models.add("Qwen3ForCausalLM", "rtp_plugin_qwen.qwen3")`.

    The module holds a class of that name, `weight_descriptors(config)` and `state_descriptors(config)`.
    """


@hookspec
def rtp_register_weights(weights: ExtensionRegistry) -> None:
    """Add a checkpoint layout to a known model: `weights.add(architecture, name, "package.module:function")`.

    The function takes the config and returns `WeightDescriptors`.
    """


@hookspec
def rtp_register_states(states: ExtensionRegistry) -> None:
    """Add another way to keep a known model's state: `states.add(architecture, name, "package.module:function")`.

    The function takes the config and returns `StateDescriptors`.
    """


@hookspec
def rtp_register_kernels(ops: OpRegistrations) -> None:
    """Add implementations of ops: `ops.add("paged_attention", "package.module:implementation")`."""


@hookspec
def rtp_register_parsers(parsers: ExtensionRegistry) -> None:
    """Add formats of text: `parsers.add("tool_call" or "reasoning", name, "package.module:Class")`."""


@hookspec
def rtp_register_processors(processors: ExtensionRegistry) -> None:
    """Add media processors: `processors.add(architecture, name, "package.module:Class")`."""


@hookspec
def rtp_register_commands(app: CommandRegistry) -> None:
    """Add sub-commands of `rtp`: `app.add("serve", "package.module", "one line for rtp --help")`.

    The module looks like one of `rtp_runtime.cli`: `configure(parser)` and `run(args) -> int`.
    """
