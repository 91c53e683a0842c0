"""`rtp plugins`: what is installed, what it provides, what failed and why. Imports no torch."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rtp_runtime.cli.output import print_json

if TYPE_CHECKING:
    from rtp_runtime.plugins import Plugins

SUMMARY = "what is installed, what it provides, what failed and why"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """List plugins. Failures are told, not an error: a plugin may be broken where nobody needs it."""
    from rtp_runtime.plugins import load_plugins

    plugins = load_plugins(args.plugin)
    if args.json:
        print_json(report(plugins))
    else:
        print(describe(plugins, tracebacks=args.debug))
    return 0


def report(plugins: Plugins) -> dict[str, Any]:
    """What `--json` prints."""
    from rtp_runtime.hookspecs import API_VERSION

    return {
        "api": API_VERSION,
        "plugins": [asdict(plugin) for plugin in plugins.loaded],
        "failures": [asdict(failure) for failure in plugins.failures],
        "conflicts": plugins.conflicts(),
    }


def describe(plugins: Plugins, *, tracebacks: bool = False) -> str:
    """The same for people."""
    lines: list[str] = []
    for plugin in plugins.loaded:
        source = f"{plugin.distribution} {plugin.version}" if plugin.distribution else f"module {plugin.module}"
        lines.append(f"{plugin.name}  ({source})")
        lines.append(f"  hooks          {', '.join(plugin.hooks)}")
        lines += [f"  architectures  {', '.join(plugin.architectures)}"] if plugin.architectures else []
    for failure in plugins.failures:
        lines.append(f"FAILED {failure}")
        if tracebacks and failure.traceback:
            lines += [f"    {line}" for line in failure.traceback.rstrip().splitlines()]
    if not tracebacks and any(failure.traceback for failure in plugins.failures):
        lines.append("(rtp plugins --debug shows the tracebacks)")
    lines += [f"CONFLICT {conflict}" for conflict in plugins.conflicts()]
    return (
        "\n".join(lines)
        or "No plugin is installed. `rtp enable MODEL` writes one; plugins/ in rtp's repository has others."
    )
