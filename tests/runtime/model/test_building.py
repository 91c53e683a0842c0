"""A plugin whose module and declarations disagree, or whose code fails, is told so by name."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rtp_kernel.batch import Build
from rtp_kernel.components import Linear
from rtp_kernel.registry import Support
from rtp_runtime.errors import ConfigError, KernelError, PluginError, UnsupportedModelError
from rtp_runtime.lazy import LazyTarget, Origin
from rtp_runtime.model import LoadedModel, load_model
from rtp_runtime.model.registry import ModelDefinition
from rtp_runtime.plugins import Plugins
from rtp_runtime.plugins.registries import Extension
from rtp_runtime.state import PagedState, StateDescriptors, WindowState
from rtp_runtime.weights import FromCheckpoint, Layout, Permute, Tie, Weight, WeightDescriptors

ORIGIN = Origin("toy", "rtp-plugin-toy", "1.2")
WEIGHTS = (
    Weight(parameter="proj.weight", source=FromCheckpoint("proj.weight", (3, 2))),
    Weight(parameter="gain", source=FromCheckpoint("gain", (2,)), dtype="float32"),
    Weight(parameter="table", source=FromCheckpoint("table", (4,)), dtype="int64"),
)
STORED = {"proj.weight": torch.randn(3, 2), "gain": torch.ones(2), "table": torch.arange(4)}


class Toy(nn.Module):
    """A linear, a pinned parameter and a persistent buffer."""

    def __init__(self, config: Any, build: Build) -> None:
        super().__init__()
        self.dtype_seen = build.dtype
        self.proj = Linear(2, 3)
        self.gain = nn.Parameter(torch.empty(2, dtype=torch.float32), requires_grad=False)
        self.register_buffer("table", torch.empty(4, dtype=torch.int64))


class Load:
    """Writes a checkpoint and loads it with a plugin made of `model_class` and the given declarations."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.monkeypatch = monkeypatch

    def __call__(
        self,
        model_class: type[Any] = Toy,
        *,
        weights: Callable[[Any], Any] | None = None,
        states: Callable[[Any], Any] | None = None,
        accepts: Callable[[Any], Any] | None = None,
        layouts: Callable[[Any], Any] | None = None,
        policy: Callable[[Any], Any] | None = None,
        stored: dict[str, torch.Tensor] | None = None,
        **options: Any,
    ) -> LoadedModel:
        raw = {"architectures": ["Toy"], "model_type": "toy", "dtype": "float32"}
        (self.directory / "config.json").write_text(json.dumps(raw))
        save_file(STORED if stored is None else stored, self.directory / "model.safetensors")
        module = types.ModuleType("toy_module")
        module.__dict__.update(
            Toy=model_class,
            weight_descriptors=weights or (lambda config: WeightDescriptors(*WEIGHTS)),
            state_descriptors=states or (lambda config: StateDescriptors([{"kv": PagedState(axes={"kv": 2})}])),
        )
        if accepts is not None:
            module.__dict__["accepts"] = accepts
        if layouts is not None:
            module.__dict__["layouts"] = layouts
        if policy is not None:
            module.__dict__["policy"] = policy
        self.monkeypatch.setitem(sys.modules, "toy_module", module)
        definition = ModelDefinition("Toy", LazyTarget("toy_module", None, ORIGIN))
        extra = (Extension("Toy", "turned", LazyTarget("toy_module", "layouts", ORIGIN)),) if layouts else ()
        added = (Extension("Toy", "brief", LazyTarget("toy_module", "policy", ORIGIN)),) if policy else ()
        plugins = Plugins(models=(definition,), weights=extra, states=added)
        return load_model(self.directory, plugins=plugins, **options)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    return Load(tmp_path, monkeypatch)


def test_pinned_parameters_and_buffers(load: Load) -> None:
    module: Any = load(dtype="bfloat16").module
    assert module.dtype_seen == module.proj.logical("weight").dtype == torch.bfloat16
    assert module.gain.dtype == torch.float32 and torch.equal(module.gain, STORED["gain"])
    assert not isinstance(module.table, nn.Parameter) and torch.equal(module.table, STORED["table"])
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert torch.get_default_dtype() == torch.float32


def with_parameter(**more: Any) -> type[Any]:
    class Changed(Toy):
        def __init__(self, config: Any, build: Build) -> None:
            super().__init__(config, build)
            for name, value in more.items():
                setattr(self, name, value() if callable(value) else value)

    return Changed


def without(name: str) -> Callable[[Any], WeightDescriptors]:
    return lambda config: WeightDescriptors(*(weight for weight in WEIGHTS if weight.parameter != name))


@pytest.mark.parametrize(
    ("model_class", "message"),
    [
        (
            with_parameter(bias=lambda: nn.Parameter(torch.empty(3))),
            r"bias \[3\] is in the module and has no descriptor",
        ),
        (with_parameter(proj=None), "proj.weight has a descriptor and is not in the module"),
        (
            with_parameter(proj=lambda: Linear(3, 2)),
            r"proj.weight is \[2, 3\] in the module; its descriptor makes \[3, 2\]",
        ),
        (
            with_parameter(gain=lambda: nn.Parameter(torch.empty(2))),
            "gain is bfloat16 in the module; its descriptor says float32",
        ),
    ],
    ids=["undescribed", "not there", "shape", "dtype"],
)
def test_module_and_descriptors_disagree(model_class: type[Any], message: str, load: Load) -> None:
    with pytest.raises(PluginError, match=message) as caught:
        load(model_class, dtype="bfloat16")
    assert "rtp-plugin-toy 1.2" in str(caught.value)


def test_a_buffer_that_nobody_makes(load: Load) -> None:
    class Loose(Toy):
        def __init__(self, config: Any, build: Build) -> None:
            super().__init__(config, build)
            self.register_buffer("mask", torch.empty(4), persistent=False)

    with pytest.raises(
        PluginError, match=r"buffer mask of Toy is neither in the checkpoint nor made by a component's bind"
    ):
        load(Loose)


class Fails(Toy):
    def __init__(self, config: Any, build: Build) -> None:
        raise RuntimeError("no such thing")


class ReadsAMissingKey(Toy):
    def __init__(self, config: Any, build: Build) -> None:
        super().__init__(config, build)
        self.size = config.hidden_size


def fail(config: Any) -> Any:
    raise RuntimeError("no such thing")


def test_plugin_code_that_fails(load: Load) -> None:
    with pytest.raises(PluginError, match="building of Toy failed: RuntimeError: no such thing"):
        load(Fails)
    for name in ("weights", "states", "accepts"):
        with pytest.raises(PluginError, match="Toy failed: RuntimeError: no such thing"):
            load(**{name: fail})
    with pytest.raises(ConfigError, match="has no 'hidden_size'"):
        load(ReadsAMissingKey)
    with pytest.raises(PluginError, match="weight_descriptors of Toy returned list, not WeightDescriptors"):
        load(weights=lambda config: [])
    with pytest.raises(PluginError, match="state_descriptors of Toy returned dict, not StateDescriptors"):
        load(states=lambda config: {})
    with pytest.raises(PluginError, match=r"is not a torch\.nn\.Module"):
        load(type("NotAModule", (), {"__init__": lambda self, config, build: None}))


def test_a_config_that_is_declined(load: Load) -> None:
    with pytest.raises(UnsupportedModelError, match="declines this config: too wide; too deep"):
        load(accepts=lambda config: Support(False, ("too wide", "too deep")))
    with pytest.raises(UnsupportedModelError, match="it gives no reason"):
        load(accepts=lambda config: False)
    load(accepts=lambda config: Support(True))


def test_no_implementation_of_an_op(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rtp_runtime.model.building.default_registry", lambda: default_without("linear"))
    with pytest.raises(KernelError, match="linear"):
        load()


def default_without(op: str) -> Any:
    from rtp_kernel.registry import OpRegistry

    return OpRegistry({})


def test_a_layout_that_a_plugin_adds(load: Load) -> None:
    turned = Permute(FromCheckpoint("proj.turned", (2, 3)), (1, 0))
    stored = {"proj.turned": torch.randn(2, 3), "gain": STORED["gain"], "table": STORED["table"]}
    added = WeightDescriptors(Weight(parameter="proj.weight", source=turned), *WEIGHTS[1:])
    loaded = load(layouts=lambda config: added, stored=stored)
    assert loaded.weights.layout.name == "turned"
    module: Any = loaded.module
    assert torch.equal(module.proj.logical("weight"), stored["proj.turned"].T)
    with pytest.raises(PluginError, match="returned no WeightDescriptors"):
        load(layouts=lambda config: Layout("x", ()), stored=stored)


def test_a_policy_of_states_that_a_plugin_adds(load: Load) -> None:
    brief = PagedState(axes={"kv": 2}, reuse="none", capacity=0.25)
    loaded = load(policy=lambda config: StateDescriptors([{"kv": brief}]))
    assert loaded.states[0]["kv"].reuse == "prefix"
    assert loaded.state_policies["brief"][0]["kv"] == brief
    others = [{"kv": PagedState(axes={"kv": 3})}, {"k": brief}, {"kv": WindowState(axes={"kv": 2}, window=4)}]
    for other in others:
        with pytest.raises(PluginError, match="under other policies: its layers, names, kinds, axes and dtypes"):
            load(policy=lambda config, other=other: StateDescriptors([other]))
    with pytest.raises(PluginError, match="state policy 'brief' of Toy failed: ZeroDivisionError"):
        load(policy=lambda config: 1 // 0)


def test_a_tie_shares_memory_and_its_parameter_counts_as_described(load: Load) -> None:
    class Tied(Toy):
        def __init__(self, config: Any, build: Build) -> None:
            super().__init__(config, build)
            self.head = Linear(2, 3)

    tied = WeightDescriptors(*WEIGHTS, Tie("head.weight", "proj.weight"))
    module: Any = load(Tied, weights=lambda config: tied).module
    assert module.head.logical("weight").data_ptr() == module.proj.logical("weight").data_ptr()
