"""Builds wheels, installs the runtime's and one plugin's into a fresh environment for each plugin, and runs them there.

The environments see torch, transformers and their dependencies through a folder of links, and nothing of ours: a file
that a wheel lacks, or a plugin that leans on another, fails here.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tools" / "alone_run.py"
OURS = ("rtp_", "_rtp_", "_editable_", "__editable__", "rtp-")
AT_ONCE = 2
"""Processes, of one thread each: as many as the cores of a small machine."""


def main() -> int:
    plugins = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
    parser = argparse.ArgumentParser(prog="tools/alone", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plugin", nargs="*", metavar="PLUGIN", help=f"of {', '.join(plugins)}; default: all")
    chosen = parser.parse_args().plugin or plugins
    unknown = set(chosen) - set(plugins)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: no folder of plugins/, which has {', '.join(plugins)}")
    with tempfile.TemporaryDirectory(prefix="rtp-alone-") as temporary:
        home = Path(temporary)
        say("building wheels")
        build_wheels(home / "wheels", chosen)
        link_foreign_packages(home / "shared")
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            # The largest first, so that the processes end together.
            chosen = sorted(chosen, key=lambda plugin: -len(list((ROOT / "plugins" / plugin / "src").rglob("*.py"))))
            results = list(pool.map(lambda plugin: run_plugin(home, plugin), chosen))
    failed = [plugin for plugin, status in zip(chosen, results, strict=True) if status]
    say(f"failed: {', '.join(failed)}" if failed else f"{', '.join(chosen)}: each works alone")
    return 1 if failed else 0


def build_wheels(target: Path, plugins: list[str]) -> None:
    sources = [ROOT, *(ROOT / "plugins" / plugin for plugin in plugins)]
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", target, *sources)


def link_foreign_packages(target: Path) -> None:
    """A folder with a link to everything that is installed here and not ours."""
    target.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(OURS):
            (target / entry.name).symlink_to(entry)


def run_plugin(home: Path, plugin: str) -> int:
    """Install the runtime's and the plugin's wheel into an empty environment, and run them there."""
    started, folder = time.monotonic(), home / plugin
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "shared.pth").write_text(f"{home / 'shared'}\n", encoding="utf-8")
    wheels = [*home.glob("wheels/rtp_runtime-*.whl"), *home.glob(f"wheels/rtp_plugin_{plugin}-*.whl")]
    pip("--python", python, "install", "--no-deps", "--no-index", *wheels)
    command = [python, "-I", SCRIPT, plugin]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        print(done.stderr, end="", file=sys.stderr, flush=True)
    say(f"{plugin}: {'failed' if done.returncode else 'passed'} in {time.monotonic() - started:.0f} s")
    return done.returncode


def pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    subprocess.run(command, check=True, cwd=ROOT)


def say(message: str) -> None:
    print(f"alone: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
