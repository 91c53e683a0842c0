"""`rtp enable`: says which plugin serves a checkpoint, or writes one and proves it."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtp_runtime.cli.output import print_json, say

if TYPE_CHECKING:
    from rtp_runtime.enable.assess import Assessment
    from rtp_runtime.enable.estimates import Estimates

SUMMARY = "assess a checkpoint: which plugin serves it, or write one"

EXIT_REFUSED = 3
GRADES = {
    "relative": "a subclass of an installed model",
    "composed": "a model file of components alone",
    "bridged": "some blocks are transformers' own; of them rtp check judges state and scheduling alone",
}
"""What each grade of a written plugin means."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("model", metavar="MODEL", help="a checkpoint directory, a hub id, or a config.json")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the plugin's folder (default: ./rtp-plugin-NAME)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the checkpoint ships")


def run(args: argparse.Namespace) -> int:
    """Assess, write, and say what was found: 0 covered or written, 3 refused."""
    from rtp_runtime.enable import find_config, plugin_names
    from rtp_runtime.enable.assess import assess, covered
    from rtp_runtime.enable.scaffold import check_target, write_files
    from rtp_runtime.plugins import load_plugins

    config, weights = find_config(args.model, trust_remote_code=args.trust_remote_code)
    plugins = load_plugins(args.plugin)
    found = covered(config, plugins)
    target: Path | None = None
    if found is None:
        names = plugin_names(config.raw.get("model_type"), config.architecture)
        target = args.out if args.out is not None else Path(names.distribution)
        check_target(target)
        for failure in plugins.failures:
            say(f"note: {failure}")
        say(f"no plugin provides {config.architecture}; comparing components with transformers' implementation …")
        found = assess(config, weights, plugins=plugins, trust_remote_code=args.trust_remote_code)
        if found.files:
            write_files(found.files, target)
    written = target if found.files else None
    if args.json:
        print_json(report(found, written))
    else:
        print(describe(found, args.model, written))
    return EXIT_REFUSED if found.verdict == "refused" else 0


def report(found: Assessment, written: Path | None) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "verdict": found.verdict,
        "architecture": found.architecture,
        "served_by": found.served_by,
        "recognised": list(found.recognised),
        "not_recognised": [asdict(refusal) for refusal in found.refusals],
        "proof": asdict(found.proof) if found.proof else None,
        "estimates": asdict(found.estimates) if found.estimates else None,
        "audited_tensors": found.audited,
        "next": install_command(written) if written else None,
        "files": sorted(found.files) if written else [],
        "path": str(written) if written else None,
    }


def install_command(folder: Path) -> str:
    """A path, never a bare name that an index could answer."""
    plain = folder.is_absolute() or folder.parts[0] == ".."
    return f"pip install {shlex.quote(str(folder) if plain else f'./{folder}')}"


def describe(found: Assessment, model: str, written: Path | None) -> str:
    """The same for people; the path comes last."""
    if found.verdict == "covered":
        return f"{found.architecture} is served by {found.served_by}: nothing to write. Next: rtp check {model}"
    lines = ["recognised:", *(f"  {line}" for line in found.recognised)] if found.recognised else []
    lines += estimate_lines(found.estimates) if found.estimates else []
    if found.verdict == "refused":
        lines.append("not recognised:")
        for refusal in found.refusals:
            lines += [f"  {refusal.block}: {refusal.reason}", f"    needs {refusal.needs}"]
        lines.append("refused: nothing was written. docs/adding-a-model.md shows how to write a plugin by hand.")
        return "\n".join(lines)
    assert found.proof is not None and written is not None
    proof = found.proof
    audited = f"{found.audited} tensors of the checkpoint accounted for" if found.audited else "no weights to audit"
    lines += [
        f"not recognised: {'what is bridged' if found.verdict == 'bridged' else 'nothing'}",
        f"{found.verdict}: {GRADES[found.verdict]}",
        f"proof: logits of a small random copy ({proof.num_layers} layers) within {proof.error:.1e} of transformers'"
        f" (tolerance {proof.tolerance:.0e}); {audited}",
        f"next: {install_command(written)} && rtp check {model if found.audited else 'CHECKPOINT'}",
        str(written),
    ]
    return "\n".join(lines)


def estimate_lines(found: Estimates) -> list[str]:
    """What serving it would take, in two lines."""
    active = f", {_short(found.active_parameters)} met by a token" if found.active_parameters < found.parameters else ""
    sizes = ", ".join(f"{size / 2**30:.1f} GiB in {dtype}" for dtype, size in found.weight_bytes.items())
    lines = [
        f"size: {_short(found.parameters)} parameters{active}; {sizes}; {found.flops_per_token / 1e9:.1f} GFLOP a token"
    ]
    if found.state is not None:
        kept = f"{found.state.per_token / 2**10:.1f} KiB a token"
        fixed = f", {found.state.per_request / 2**20:.1f} MiB a request" if found.state.per_request else ""
        lines.append(f"state: {kept}{fixed}, in bfloat16 where the model does not say otherwise")
    return lines


def _short(count: int) -> str:
    return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"
