"""`rtp inspect`: what a checkpoint holds and needs, and what serves it. Reads headers, never the data of a tensor."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rtp_runtime.cli.output import print_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SUMMARY = "config, weight plan and audit, state groups and bytes, chosen kernels and why"

EXIT_REFUSED = 2

Report = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("model", metavar="MODEL", help="a checkpoint directory, a hub id, or a bare config")
    parser.add_argument("--weights", action="store_true", help="every parameter, what it is made of, and the plan")
    parser.add_argument("--dtype", default="auto", help='"auto" (the checkpoint\'s), float32, bfloat16 …')
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trust-remote-code", action="store_true", help="allow code that the checkpoint brings")


def run(args: argparse.Namespace) -> int:
    """Inspect MODEL; exit status 0, or 2 when something keeps it from being loaded."""
    from rtp_runtime.model.inspection import inspect_model
    from rtp_runtime.plugins import load_plugins

    report = inspect_model(
        args.model,
        load_plugins(args.plugin),
        dtype=args.dtype,
        device=args.device,
        trust_remote_code=args.trust_remote_code,
    )
    if args.json:
        print_json(report)
    else:
        from rich.console import Console

        show(report, Console(highlight=False, soft_wrap=False), weights=args.weights)
    return EXIT_REFUSED if report["problems"] else 0


def show(report: Report, console: Console, *, weights: bool) -> None:
    """The report for people, part by part."""
    parts: list[tuple[str, Table | None]] = [
        ("Model", _model(report)),
        ("Config", _config(report["config"])),
        ("Weights", _weights(report)),
        ("State", _states(report.get("states") or [])),
        ("Reuse of prefixes", _reuse(report)),
        ("Kernels", _kernels(report.get("kernels") or [])),
        ("Bridged: transformers' own code, under our state and scheduling", _bridged(report.get("bridged") or [])),
    ]
    if weights and report.get("weights"):
        parts.insert(3, ("Parameters", _parameters(report["weights"]["parameters"])))
        parts.insert(4, ("Plan, in file order", _reads(report["weights"].get("plan"))))
    for title, table in parts:
        if table is not None and table.row_count:
            console.print(f"\n[bold]{title}[/bold]")
            console.print(table)
    for problem in report["problems"]:
        console.print(f"\n[bold red]Refused ({problem['part']}):[/bold red]", end=" ")
        console.print(problem["message"], markup=False)


def _model(report: Report) -> Table:
    table = _pairs()
    config, plugin = report["config"], report["plugin"]
    table.add_row("checkpoint", _text(report["path"]))
    table.add_row("architecture", _text(f"{config['architecture']} (model type {config['model_type'] or 'not given'})"))
    if plugin:
        source = f"{plugin['distribution']} {plugin['version']}" if plugin["distribution"] else "named by hand"
        table.add_row("served by", _text(f"plugin {plugin['name']} ({source}): {plugin['target']}"))
    else:
        table.add_row("served by", "[red]no plugin[/red]")
    if report["dtype"]:
        table.add_row("runs in", _text(f"{report['dtype']} on {report['device']}"))
    return table


def _config(config: Report) -> Table:
    table = _pairs()
    for name, value in config["read"].items():
        table.add_row(_text(name), _text(_value(value)))
    if not config["known_to_transformers"]:
        table.add_row("note", "transformers does not know this model type; the JSON is read as it is")
    if config["unread"]:
        table.add_row("[yellow]read by nobody[/yellow]", _text(", ".join(config["unread"])))
    if config["inert"]:
        table.add_row("[dim]of no effect here[/dim]", _text(", ".join(config["inert"])))
    return table


def _weights(report: Report) -> Table:
    table = _pairs()
    for file in report["files"]:
        missing = ", [yellow]headers only, its data is missing[/yellow]" if file["data"] == "missing" else ""
        table.add_row(_text(file["file"]), f"{file['tensors']} tensors, {_size(file['bytes'])}{missing}")
    found = report.get("weights")
    if not found:
        return table
    total = sum(_count(parameter["shape"]) for parameter in found["parameters"])
    table.add_row("parameters", f"{total:,} in {len(found['parameters'])} tensors of the module")
    if found["clean"] is None:
        table.add_row("audit", "no weights here; these are the parameters that the model asks for")
        return table
    verdict = "[green]clean[/green]" if found["clean"] else "[red]not clean[/red]"
    table.add_row("audit", f"{verdict}, layout {found['layout']!r}")
    for audit in found["audits"]:
        _add_audit(table, audit, found["layout"])
    if plan := found.get("plan"):
        more = plan["bytes_read"] - plan["bytes_kept"]
        table.add_row("plan", f"reads {_size(plan['bytes_read'])}, {_size(more)} more than it keeps")
    return table


def _add_audit(table: Table, audit: Report, chosen: str) -> None:
    if audit["layout"] != chosen:
        table.add_row(
            "[dim]not taken[/dim]", f"[dim]layout {audit['layout']!r}: {audit['num_findings']} findings[/dim]"
        )
        return
    for target, source in audit["ties"].items():
        table.add_row("tied", _text(f"{target} is {source}"))
    reasons: dict[str, list[str]] = {}
    for name, reason in audit["skipped"].items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        table.add_row("left out", _text(f"{len(names)} tensors ({names[0]} …): {reason}"))
    for note in audit["notes"]:
        table.add_row("note", _text(note))


def _parameters(parameters: list[Report]) -> Table:
    """A line for each parameter of a layer, with the layers that have it."""
    table = _columns("parameter", "of", "shape", "dtype", "from")
    groups: dict[tuple[str, ...], list[int]] = {}
    for parameter in parameters:
        layer, name = _without_layer(parameter["name"])
        sources = [_without_layer(source)[1] for source in parameter["tensors"]]
        dtype = parameter["dtype"] + (" (pinned)" if parameter["pinned"] else "")
        stored = [other for other in parameter["stored"] if other != parameter["dtype"]]
        dtype += f" from {', '.join(stored)}" if stored else ""
        row = (name, str(parameter["shape"]), dtype, "its own name" if sources == [name] else _some(sources))
        groups.setdefault(row, []).extend([] if layer is None else [layer])
    for (name, shape, dtype, origin), layers in groups.items():
        table.add_row(_text(name), _ranges(layers), _text(shape), dtype, _text(origin))
    return table


def _without_layer(name: str) -> tuple[int | None, str]:
    """The first number in a dotted name, and the name with `{layer}` in its place."""
    parts = name.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    if place is None:
        return None, name
    return int(parts[place]), ".".join([*parts[:place], "{layer}", *parts[place + 1 :]])


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _some(names: list[str]) -> str:
    shown = names if len(names) <= 4 else [*names[:2], f"… {len(names) - 3} more", names[-1]]
    return "\n".join(shown)


def _reads(plan: Report | None) -> Table | None:
    """A line for each run of bytes without a gap."""
    if plan is None:
        return None
    table = _columns("file", "from byte", "to byte", "tensors")
    runs: list[list[Report]] = []
    for read in plan["reads"]:
        last = runs[-1][-1] if runs else None
        if last and last["file"] == read["file"] and last["start"] + last["bytes"] == read["start"]:
            runs[-1].append(read)
        else:
            runs.append([read])
    for run in runs:
        first, last = run[0], run[-1]
        which = first["tensor"] if len(run) == 1 else f"{len(run)}, from {first['tensor']} to {last['tensor']}"
        table.add_row(_text(first["file"]), f"{first['start']:,}", f"{last['start'] + last['bytes']:,}", _text(which))
    return table


def _states(groups: list[Report]) -> Table:
    table = _columns("group", "block", "bytes", "per token", "states", "block size is")
    for index, group in enumerate(groups):
        kind = f"{index} {group['kind']}" + (f" of {group['window']}" if group["window"] else "")
        block = f"{group['block_size']} tokens" if group["block_size"] else "slot"
        per_token = _size(group["bytes_per_token"]) if group["block_size"] else ""
        states = _text("\n".join(group["states"]))
        table.add_row(kind, block, _size(group["bytes"]), per_token, states, _text(group["forced_by"]))
    return table


def _reuse(report: Report) -> Table | None:
    """What requests to come may have of each group, and the policies that can be chosen instead."""
    groups = report.get("states") or []
    if not groups:
        return None
    table = _pairs()
    unit = _hit_unit(groups)
    whole = all(group["reuse"] == "prefix" for group in groups)
    table.add_row("prefixes", f"reused in multiples of {unit} tokens" if whole else "not reused: a state forbids it")
    for index, group in enumerate(groups):
        share = f"; at most {group['capacity']:.0%} of the memory" if group["capacity"] < 1 else ""
        table.add_row(f"{index} {group['kind']}", f"{_kept(group)}{share}")
    if report["state_policies"]:
        table.add_row("other policies", _text(f"state_policy={', '.join(map(repr, report['state_policies']))}"))
    return table


def _kept(group: Report) -> str:
    if group["reuse"] == "none":
        return "nothing is kept"
    if group["retention"] is None:
        return "each block, while the last window is held" if group["window"] else "each block"
    places = {"prompt_end": "the end of the prompt", "branch": "branches", "latest": "the latest place"}
    found = [name for key, name in places.items() if group["retention"][key]]
    if every := group["retention"]["every"]:
        found.append(f"every {every} tokens")
    return f"copies at {', '.join(found)}" if found else "no copies"


def _hit_unit(groups: list[Report]) -> int:
    from math import lcm

    from rtp_runtime.state.grouping import DEFAULT_BLOCK_SIZE

    sizes = [group["block_size"] for group in groups if group["block_size"]]
    return lcm(*sizes) if sizes else DEFAULT_BLOCK_SIZE


def _kernels(choices: list[Report]) -> Table:
    table = _columns("op", "regime", "taken", "for", "refused before it")
    for choice in choices:
        refused = "\n".join(f"{each['implementation']}: {', '.join(each['reasons'])}" for each in choice["refused"])
        where = _without_layer(choice["for"])[1].removeprefix("model.layers.{layer}.")
        where += f" × {choice['components']}" if choice["components"] > 1 else ""
        table.add_row(choice["op"], choice["regime"], choice["implementation"], _text(where), _text(refused))
    return table


def _bridged(blocks: list[Report]) -> Table:
    """Layers whose blocks have one target in one row."""
    table, places = _columns("block", "target", "layers"), dict[tuple[str, str], int]()
    for block in blocks:
        key = (_without_layer(block["block"])[1], block["target"])
        places[key] = places.get(key, 0) + 1
    for (name, target), count in places.items():
        table.add_row(_text(name), _text(target), str(count))
    return table


def _pairs() -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=14)
    table.add_column(overflow="fold")
    return table


def _columns(*names: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _text(value: str) -> Any:
    """Text that came from a checkpoint or plugin: shown as it is, never as markup."""
    from rich.text import Text

    return Text(value)


def _value(value: Any) -> str:
    if isinstance(value, list) and len(value) > 4:
        runs: list[list[Any]] = []
        for item in value:
            if runs and runs[-1][1] == item:
                runs[-1][0] += 1
            else:
                runs.append([1, item])
        shown = ", ".join(f"{count} x {item}" if count > 1 else str(item) for count, item in runs[:8])
        return shown + (", …" if len(runs) > 8 else "")
    return str(value)


def _count(shape: list[int]) -> int:
    import math

    return math.prod(shape)


def _size(num_bytes: float) -> str:
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= step:
            return f"{num_bytes / step:,.1f} {unit}"
    return f"{num_bytes:,.0f} bytes"
