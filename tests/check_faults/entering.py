"""Putting a fault in its place: an edited copy of a checkpoint, a plugin that replaces ours, or an engine part."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from check_faults.catalogue import Fault
from rtp_runtime.check import CheckOptions

QWEN, DEEPSEEK = "rtp-plugin-qwen", "rtp-plugin-deepseek"
MODELS = {
    "qwen2": ("Qwen2ForCausalLM", QWEN),
    "qwen2_moe": ("Qwen2MoeForCausalLM", QWEN),
    "qwen3": ("Qwen3ForCausalLM", QWEN),
    "qwen3_moe": ("Qwen3MoeForCausalLM", QWEN),
    "qwen3_next": ("Qwen3NextForCausalLM", QWEN),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DEEPSEEK),
    "deepseek_v32": ("DeepseekV32ForCausalLM", DEEPSEEK),
    "deepseek_v4": ("DeepseekV4ForCausalLM", DEEPSEEK),
}
"""Checkpoints whose model may be replaced by a faulty copy: the class, and the plugin that provides it."""

MODEL_PLUGIN = """
from rtp_runtime import hookimpl

RTP_API = "0.1"


@hookimpl
def rtp_register_models(models):
    models.add("{architecture}", "{target}", replaces="{replaces}")
"""

OP_PLUGIN = """
from rtp_runtime import hookimpl

RTP_API = "0.1"


@hookimpl
def rtp_register_kernels(ops):
    ops.add("{op}", "check_faults.{implementation}")
"""

DESCRIPTORS = """
import rtp_plugin_qwen.{base} as original
from check_faults.descriptors import *
from rtp_plugin_qwen.{base} import {architecture}, state_descriptors

weight_descriptors = edited(original, {expression})
"""


@dataclass(frozen=True, slots=True)
class Entered:
    """What `run_check` must be asked, and where a plugin was written."""

    model: Path
    reference: Path
    plugins: tuple[str, ...]

    def options(self, stages: tuple[str, ...], lengths: tuple[int, ...]) -> CheckOptions:
        reference = None if self.model == self.reference else self.reference
        return CheckOptions(
            model=self.model,
            reference=reference,
            plugins=self.plugins,
            stages=stages,
            lengths=lengths,
            num_new_tokens=6,
        )


def enter(fault: Fault, checkpoint: Path, directory: Path) -> Entered:
    """Write into `directory`, which must be importable, what the fault needs. `checkpoint` stays as it is."""
    model = checkpoint
    if fault.config or fault.tensors:
        model = directory / f"{fault.name}_checkpoint"
        edit_checkpoint(fault, checkpoint, model)
    return Entered(model, checkpoint, write_plugin(fault, directory))


def edit_checkpoint(fault: Fault, checkpoint: Path, copy: Path) -> None:
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "config.json").read_text()) | dict(fault.config)
    (copy / "config.json").write_text(json.dumps(config))
    if fault.tensors is not None:
        tensors = load_file(copy / "model.safetensors")
        fault.tensors(tensors)
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})


def write_plugin(fault: Fault, directory: Path) -> tuple[str, ...]:
    """The plugin that brings a faulty model, descriptors or op; its module's name, if one is needed."""
    name = f"fault_{fault.name}"
    architecture, replaces = MODELS.get(fault.base, ("", ""))
    if fault.weights:
        text = DESCRIPTORS.format(base=fault.base, architecture=architecture, expression=fault.weights)
        (directory / f"{name}_model.py").write_text(text)
        text = MODEL_PLUGIN.format(architecture=architecture, target=f"{name}_model", replaces=replaces)
    elif fault.model:
        target = f"check_faults.{fault.model}"
        text = MODEL_PLUGIN.format(architecture=architecture, target=target, replaces=replaces)
    elif fault.op[0]:
        module = "ops" if fault.op[0] == "paged_attention" else "state_ops"
        module = "narrow_ops" if fault.stage == "serving" else module
        text = OP_PLUGIN.format(op=fault.op[0], implementation=f"{module}:{fault.op[1]}")
    else:
        return ()
    (directory / f"{name}.py").write_text(text)
    return (name,)
