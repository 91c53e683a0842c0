"""What tools/alone runs in an environment that has the runtime and one plugin: list, inspect, check and generate.

One process for all of a family's tiny checkpoints; the environment's own `rtp` lists the plugins. The first checkpoint
is checked whole. The others are checked up to their logits: how requests share the engine is no plugin's, and the
plugins' own tests run prompts in batches and in chunks.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PROMPT = "5,7,11,13,17,19,23"
UP_TO_LOGITS = ("--stages", "audit,pinned,probes,logits")
AGREES = "NOT-JUDGED, exit status 2: nothing differs, but not everything was judged: modes."
"""How a check up to the logits ends well: the only required stage that is missing is the one that was left out."""


def main(family: str) -> int:
    import torch

    import rtp_runtime
    from rtp_runtime.testing.tiny_configs import FAMILIES

    torch.set_num_threads(1)
    if not Path(rtp_runtime.__file__).is_relative_to(sys.prefix):
        print(f"rtp_runtime comes from {rtp_runtime.__file__}, not from this environment", file=sys.stderr)
        return 1
    problems = listing(family)
    for number, name in enumerate(FAMILIES[family]):
        problems += checkpoint(name, whole=number == 0)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def listing(family: str) -> list[str]:
    """`rtp plugins` names this plugin, whole, and no other."""
    command = [str(Path(sys.prefix) / "bin" / "rtp"), "plugins", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout) if done.returncode == 0 else {}
    names = [plugin["distribution"] for plugin in found.get("plugins", ())]
    if names != [f"rtp-plugin-{family}"] or found.get("failures"):
        return [f"`rtp plugins` exits {done.returncode} and lists {names}: {done.stdout}{done.stderr}"]
    return []


def checkpoint(name: str, whole: bool) -> list[str]:
    """Write a tiny checkpoint and run every command on it; one line on stdout, and what failed."""
    from rtp_runtime.testing.tiny_models import write_tiny

    started = time.monotonic()
    with contextlib.redirect_stderr(io.StringIO()):
        write_tiny(name, name)
    problems = []
    generate = ("generate", name, "--token-ids", PROMPT, "--max-tokens", "8")
    check = ("check", name) if whole else ("check", name, *UP_TO_LOGITS)
    for words in (("inspect", name), check, generate):
        status, said = run(words)
        if status and not (words[-2:] == UP_TO_LOGITS and said.startswith(AGREES)):
            problems.append(f"`rtp {' '.join(words)}` exits {status}:\n{said}")
    verdict = "failed" if problems else "inspect, check, generate"
    print(f"{name:22} {verdict:26} {time.monotonic() - started:5.1f} s", flush=True)
    return problems


def run(words: Sequence[str]) -> tuple[int, str]:
    from rtp_runtime.cli import main as rtp

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = rtp(list(words))
    return status, out.getvalue()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
